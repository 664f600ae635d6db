// engine/launch.h -- who starts the ranks: a launcher, which sets environment variables, or the program by --ranks N.
//
// A launcher that is recognized but cannot connect its processes is refused, with the line to type. Otherwise each
// would train on all of the data, and all would write to the same --out.
#pragma once

#include <csignal>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "../base/device.h"
#include "../base/common.h"
#include "../base/host.h"

// by: "": no launcher; "mpirun" also stands for srun --mpi=pmi2
struct Launch {
    const char* by = "";
    int rank = 0, size = 1;
    bool mpi = false;                       // the launcher has prepared MPI_Init
    std::vector<int> sockets;               // of --ranks N: to each other rank
};

// The launchers' variables, in order of precedence: mpirun in a batch job, and torchrun as the only task of a node, see
// Slurm's variables, too. A launcher is recognized by its size, and, if other programs also set that, by its rank. Only
// MPI connects the processes of a launcher; the last two are refused.
struct LauncherRow { const char *by, *size, *rank; bool rank_needed, mpi; };
constexpr LauncherRow LAUNCHERS[] = {
    {"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", false, true},
    {"mpirun", "PMI_SIZE", "PMI_RANK", false, true},                    // of MPICH; and srun --mpi=pmi2
    {"srun --mpi=pmix", "SLURM_STEP_NUM_TASKS", "PMIX_RANK", true, true},
    {"torchrun (WORLD_SIZE, RANK)", "WORLD_SIZE", "RANK", true, false},         // also in Kubernetes
    {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", true, false},
};

// get(name): the value of an environment variable, or null. Dies if it is not a number: a rank that does not know the
// number of ranks would train alone.
template <class Get> Launch find_launch(Get get) {
    const auto number = [&](const char* name, int lowest, int otherwise) {
        const char* text = get(name);
        int n = otherwise;
        check(text == nullptr || parse_value(text, at_least(lowest), n), "%s='%s' in the environment: expected an int "
              ">= %d, as a launcher sets it; unset it to train alone", name, text, lowest);
        return n;
    };
    for (const LauncherRow& row : LAUNCHERS) {
        const int size = number(row.size, 1, 0), rank = number(row.rank, 0, -1);
        if (size == 0 || (row.rank_needed && rank < 0)) { continue; }
        if (size == 1) { break; }
        return {row.by, std::max(rank, 0), size, row.mpi, {}};
    }
    return Launch();
}
inline Launch find_launch() {
    return find_launch([](const char* name) { return (const char*)getenv(name); });
}

// ----------------------------------------------------------------------------------------------------------
// refused launchers, and the lines to type instead

// A command line, quoted for a shell
inline std::string shell_line(const Names& words) {
    std::string s;
    for (const std::string& w : words) {
        std::string quoted = w;
        if (w.empty() || w.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%")
                             != std::string::npos) {
            quoted = "'";
            for (char c : w) { quoted += c == '\'' ? "'\\''" : std::string(1, c); }
            quoted += "'";
        }
        s += (s.empty() ? "" : " ") + quoted;
    }
    return s;
}

// Why the processes of this launcher cannot form one run, and what to type instead
inline std::string launch_refusal(const Launch& l, Names program) {
    for (size_t i = 1; i + 1 < program.size(); i++) {       // else each task would start its own
        if (program[i] != "--ranks" && program[i] != "--gpus") { continue; }
        program.erase(program.begin() + (ptrdiff_t)i, program.begin() + (ptrdiff_t)i + 2);
    }
    const std::string line = shell_line(program), several = strncmp(l.by, "srun", 4) == 0 ? "srun --mpi=pmix -n"
                                                                                          : "mpirun -np";
    const std::string why = l.mpi ? "this program was built without MPI: install it (dev/install.sh ranks, or make "
                                    "OPENMPI_DIR=path) and run make again"
                                  : "only MPI connects the ranks of several machines; there, type: " + several +
                                    strprintf(" %d ", l.size) + line;
    return strprintf("%s started %d processes, each of which would train alone: %s; on one machine, type: %s %s %d",
                     l.by, l.size, why.c_str(), line.c_str(), ON_GPU ? "--gpus" : "--ranks", l.size);
}

// Ends a process whose launcher cannot work; only rank 0 says why.
[[noreturn]] inline void leave_to_rank0() {
    sleep(1);                               // the launcher ends all ranks as soon as one has failed
    _exit(EXIT_BAD_INPUT);
}
[[noreturn]] inline void refuse_launch(const Launch& l, const Names& program) {
    if (l.rank > 0) { leave_to_rank0(); }
    die(EXIT_BAD_INPUT, "%s", launch_refusal(l, program).c_str());
}

// ----------------------------------------------------------------------------------------------------------
// --ranks N: the program forks the ranks on this machine, and the parent process watches them

constexpr double GRACE_PERIOD = 3;          // seconds between the failure of a rank and SIGKILL for the others
constexpr int CROWD = 8;                    // the most ranks on a core
constexpr double LEAST_RANK = 64e6;         // bytes of memory that the smallest rank takes

// Why n ranks cannot be started here, "" if they can. crowded: the user allows several ranks per core
inline std::string crowd_refusal(int n, int cores, double memory, bool crowded) {
    const int most = std::max(1, (int)std::min((double)cores * CROWD, memory / LEAST_RANK));
    if (n <= (crowded ? most : std::min(cores, most))) { return ""; }
    return strprintf("--ranks %d: this machine has %d core%s and %s of free memory; expected at most %d, or, with "
                     "CABLE_OVERSUBSCRIBE=1 in the environment, %d (%d on a core, and %s for each)", n, cores,
                     cores == 1 ? "" : "s", format_bytes(memory).c_str(), std::min(cores, most), most, CROWD,
                     format_bytes(LEAST_RANK).c_str());
}

// In the child process, before it becomes a rank
inline void become_rank(pid_t parent, const sigset_t& signals) {
    setpgid(0, 0);                          // the terminal's signals reach only the parent, which passes them on
    signal(SIGTTOU, SIG_IGN);               // outside the terminal's group, `stty tostop` would stop what prints
    prctl(PR_SET_PDEATHSIG, SIGTERM);       // if the parent is killed
    if (getppid() != parent) { _exit(EXIT_DEVICE); }
    const int nothing = open("/dev/null", O_RDONLY);        // outside the terminal's group it may not read
    if (nothing > 0) {
        dup2(nothing, 0);
        close(nothing);
    }
    sigprocmask(SIG_SETMASK, &signals, nullptr);
}

// Waits until all ranks have ended, and passes on the signals that end a run. Returns the exit code of the first rank
// that failed; but if a signal ended a rank, 128 + its number, because others may fail first when they miss that rank.
inline int watch_ranks(std::vector<pid_t> ranks, const sigset_t& awaited) {
    int code = 0;
    double failed = 0;                      // the time of the first failure
    bool killed = false;
    for (size_t left = ranks.size(); left > 0;) {
        const timespec patience = {0, 100000000};
        const int number = sigtimedwait(&awaited, nullptr, &patience);
        const bool late = code != 0 && wall_seconds() > failed + GRACE_PERIOD;
        for (size_t r = 0; r < ranks.size(); r++) {
            int status = 0;
            if (ranks[r] < 0) { continue; }
            if (number > 0 && number != SIGCHLD) { kill(ranks[r], number); }
            if (late) { kill(ranks[r], SIGKILL); }
            const pid_t ended = waitpid(ranks[r], &status, WNOHANG);
            const bool lost = ended < 0 && errno == ECHILD;             // a library has waited for it
            if (ended != ranks[r] && !lost) { continue; }
            if (lost) {
                say("rank %zu (process %d) has ended; its exit code is lost", r, (int)ranks[r]);
                status = EXIT_DEVICE << 8;                              // as waitpid would give it
            }
            const bool signaled = WIFSIGNALED(status);
            if (signaled && !late) {
                say("rank %zu (process %d) was ended by signal %d, %s; the other ranks end, too", r, (int)ranks[r],
                    WTERMSIG(status), strsignal(WTERMSIG(status)));
            }
            ranks[r] = -1;
            left--;
            const bool cause = signaled && !late && !killed;
            if (code != 0 && !cause) { continue; }
            if (code == 0) { failed = wall_seconds(); }
            code = signaled ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
            killed = signaled;
        }
    }
    return code;
}

// The cores that this process may use
inline int cores_here() {
    cpu_set_t set;
    const bool known = sched_getaffinity(0, sizeof(set), &set) == 0;        // fails beyond 1,024 cores
    const int cores = known ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    return (int)std::min((double)cores, std::ceil(group_limits().cores));
}

// A pair of sockets for each two ranks: ends[r][other] is rank r's end, -1 for the rank itself
using SocketPairs = std::vector<std::vector<int>>;
inline SocketPairs socket_pairs(int n) {
    rlimit files = {};
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;        // n (n - 1) ends are open until all ranks are forked
        setrlimit(RLIMIT_NOFILE, &files);
    }
    SocketPairs ends((size_t)n, std::vector<int>((size_t)n, -1));
    for (size_t r = 0; r < ends.size(); r++) {
        for (size_t other = r + 1; other < ends.size(); other++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
                die(EXIT_DEVICE, "--ranks %d: socketpair (ulimit -n?): %s", n, strerror(errno));
            }
            ends[r][other] = pair[0];
            ends[other][r] = pair[1];
        }
    }
    return ends;
}
// Closes all ends except rank r's (-1: all), so that every rank sees when another has ended.
inline void close_ends(const SocketPairs& ends, int r) {
    for (int rank = 0; rank < (int)ends.size(); rank++) {
        for (int fd : ends[(size_t)rank]) { if (rank != r && fd >= 0) { close(fd); } }
    }
}

// Starts n ranks, and returns in each of them. The parent process waits for them and ends with their exit code. Called
// before any thread exists: a fork does not copy threads.
inline Launch fork_ranks(int n) {
    const char* crowded = getenv("CABLE_OVERSUBSCRIBE");
    const std::string why = crowd_refusal(n, cores_here(), (double)host_memory_available(),
                                          crowded != nullptr && strcmp(crowded, "1") == 0);
    check(why.empty(), "%s", why.c_str());
    const SocketPairs ends = socket_pairs(n);
    Launch l;
    l.by = "--ranks";
    l.size = n;
    sigset_t awaited, before;
    sigemptyset(&awaited);
    for (int number : {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGXCPU, SIGCHLD}) {
        struct sigaction action = {};
        sigaction(number, nullptr, &action);
        if (action.sa_handler != SIG_IGN) { sigaddset(&awaited, number); }      // nohup ignores SIGHUP
    }
    sigprocmask(SIG_BLOCK, &awaited, &before);
    fflush(stdout);
    const pid_t parent = getpid();
    std::vector<pid_t> ranks;
    std::string shown;
    for (l.rank = 0; l.rank < n; l.rank++) {
        const pid_t child = fork();
        if (child == 0) {
            become_rank(parent, before);
            close_ends(ends, l.rank);
            l.sockets = ends[(size_t)l.rank];
            return l;
        }
        if (child < 0) {
            const int error = errno;
            for (pid_t other : ranks) { kill(other, SIGKILL); }
            die(EXIT_DEVICE, "--ranks %d: fork: %s", n, strerror(error));
        }
        ranks.push_back(child);
        shown += " " + std::to_string(child);
    }
    close_ends(ends, -1);
    say("--ranks %d: the ranks are processes%s", n, shown.c_str());
    _exit(watch_ranks(ranks, awaited));     // not exit(): its handlers would report a rank's failure as this process's
}
