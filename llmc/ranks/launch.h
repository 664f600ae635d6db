// ranks/launch.h -- who started this process, and as which rank: launchers tell it by environment variables.
//
// A launcher that is seen but cannot be served is refused with the line to type. Otherwise each of its processes would
// take itself for the only one, train on all of the data and fight for --out.
#ifndef LLMC_RANKS_LAUNCH_H
#define LLMC_RANKS_LAUNCH_H

#include <climits>
#include <csignal>

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "../base/parse.h"

// by: "mpirun" also stands for srun with PMI; none of them if this process is alone
struct Launch {
    const char* by = "";
    int rank = 0, size = 1;
    int local_rank = 0;                     // among the processes of this machine
    bool mpi = false;                       // the launcher has prepared MPI_Init
    int local_size = 1;                     // 0 = the launcher does not say; MPI tells it
};

// The variables of a launcher, in the order in which they are looked for: mpirun inside a batch job, and torchrun as
// the only task of a node, see the variables of Slurm, too. A launcher is recognised by the size, and by the rank where
// other programs set the size as well; a missing local rank is 0.
struct LauncherRow { const char *by, *size, *rank, *local_rank, *local_size; bool rank_needed, mpi; };
constexpr LauncherRow LAUNCHERS[] = {
    {"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", false, true},
    {"mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", false, true},          // and --mpi=pmi2
    {"srun --mpi=pmix", "SLURM_STEP_NUM_TASKS", "PMIX_RANK", "SLURM_LOCALID", "", true, true},
    {"torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", true, false},
    {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "", true, false},
};

// get(name): the value of an environment variable, or null
template <class Get> Launch find_launch(Get get) {
    const auto number = [&](const char* name, int lowest, int otherwise) {
        const char* text = *name == '\0' ? nullptr : get(name);
        int n = otherwise;
        return text != nullptr && parse_value(text, at_least(lowest), n) ? n : otherwise;
    };
    for (const LauncherRow& row : LAUNCHERS) {
        if (number(row.size, 1, 0) == 0 || (row.rank_needed && number(row.rank, 0, -1) < 0)) { continue; }
        if (strcmp(row.by, "torchrun") == 0 && get(row.local_rank) == nullptr) { continue; }    // a pod of Kubernetes
        Launch l;
        l.size = number(row.size, 1, 1);
        if (l.size == 1) { return l; }      // asked for
        l.by = row.by;
        l.rank = number(row.rank, 0, 0);
        l.local_rank = number(row.local_rank, 0, 0);
        l.local_size = number(row.local_size, 1, 0);
        l.mpi = row.mpi;
        return l;
    }
    return Launch();
}
inline Launch find_launch() {
    return find_launch([](const char* name) { return (const char*)getenv(name); });
}

// ----------------------------------------------------------------------------------------------------------
// lines to type

// words as a shell takes them
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

// where a shell would find the program; "" if nowhere
inline std::string find_in_path(const char* program) {
    const char* path = getenv("PATH");
    for (const char* at = path == nullptr ? "" : path; *at != '\0';) {
        const size_t n = strcspn(at, ":");
        const std::string place = std::string(at, n) + "/" + program;
        if (n > 0 && access(place.c_str(), X_OK) == 0) { return place; }
        at += n + (at[n] == ':');
    }
    return "";
}

// What mpirun needs to start n processes on this machine: variables "NAME=value" and its flags.
struct MpirunWords { Names variables, flags; };
inline MpirunWords mpirun_words(int n) {
    MpirunWords w;
#if !defined(MPICH_VERSION)                 // Open MPI
    if (geteuid() == 0) { w.variables = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"}; }
    // Containers forbid a process to read the memory of another one. With that, messages are copied once, not twice.
    char from = 0, to = 0;
    const struct iovec here = {&to, 1}, there = {&from, 1};
    const bool container = access("/.dockerenv", F_OK) == 0 || access("/run/.containerenv", F_OK) == 0;
    if (container || process_vm_readv(getpid(), &here, 1, &there, 1, 0) != 1) {
        w.variables.push_back("OMPI_MCA_btl_vader_single_copy_mechanism=none");
    }
    w.flags = {"--bind-to", "none"};        // else two ranks get one core each, and their threads share it
    // It starts at most one process per core, and a core may have two of the processors that are counted here.
    cpu_set_t processors;
    const int count = sched_getaffinity(0, sizeof(processors), &processors) == 0 ? CPU_COUNT(&processors) : 1;
    if (2 * n > count) { w.flags.push_back("--oversubscribe"); }
    // It refuses to start without a way to other machines, although it needs none.
    const bool remote = !find_in_path("ssh").empty() || !find_in_path("rsh").empty();
    if (!remote) { w.flags.insert(w.flags.end(), {"--mca", "plm", "isolated"}); }
#endif
    w.flags.insert(w.flags.end(), {"-np", std::to_string(n)});
    return w;
}
// program: the program and its flags
inline std::string mpirun_line(int n, const Names& program, const std::string& mpirun = "mpirun") {
    const MpirunWords w = mpirun_words(n);
    Names words = w.variables;
    words.push_back(mpirun);
    words.insert(words.end(), w.flags.begin(), w.flags.end());
    words.insert(words.end(), program.begin(), program.end());
    return shell_line(words);
}

// Why the processes of this launcher cannot work together, and what to type instead. built: this program has MPI
inline std::string launch_refusal(const Launch& l, bool built, const Names& program) {
    std::string s = strprintf("%s started %d processes, each of which would train alone: ", l.by, l.size);
    if (!built) {
        s += "this program was built without MPI; install libopenmpi-dev, or give make OPENMPI_DIR=path, build again, "
             "and ";
    } else {
        s += "they have not been prepared for MPI; ";
    }
    std::string line = mpirun_line(l.size, program);
    if (l.mpi) { line = "start it as before"; }
    if (strcmp(l.by, "srun") == 0) {
        line = strprintf("srun --mpi=pmix -n %d %s (srun --mpi=list shows what it has), or inside an allocation: %s",
                         l.size, shell_line(program).c_str(), line.c_str());
    }
    return s + (l.mpi ? "" : "type: ") + line;
}

// Ends a process whose launcher cannot be served; rank 0 alone says why.
[[noreturn]] inline void refuse_launch(const Launch& l, bool built, const Names& program) {
    if (l.rank > 0) {
        sleep(1);                           // the launcher ends them all as soon as one has failed
        _exit(EXIT_BAD_INPUT);
    }
    die(EXIT_BAD_INPUT, "%s", launch_refusal(l, built, program).c_str());
}

// MPI_Init and MPI_Finalize cannot be polled: SIGALRM ends a process whose others never come.
inline void comm_too_late(int) {            // in a signal handler: no printf
    const char text[] = "error: MPI_Init or MPI_Finalize: the other ranks did not appear in time\n";
    if (write(2, text, sizeof(text) - 1) < 0) { _exit(EXIT_DEVICE); }
    _exit(EXIT_DEVICE);
}

// Why gradients cannot go from GPU to GPU, "" if they can. built: this program has NCCL; places: a number for each
// rank's machine and GPU
inline std::string nccl_refusal(bool built, const std::vector<uint64_t>& places) {
    if (!built) { return "this program was built without NCCL (give make NCCL_DIR=path, and build again)"; }
    for (size_t r = 1; r < places.size(); r++) {
        const size_t other = (size_t)(std::find(places.begin(), places.end(), places[r]) - places.begin());
        if (other < r) {
            return strprintf("ranks %zu and %zu share a GPU, and NCCL wants one for each rank: start no more ranks on "
                             "a machine than it has GPUs", other, r);
        }
    }
    return "";
}

// ----------------------------------------------------------------------------------------------------------
// --ranks N: the program starts itself again

// The mpirun of the MPI that this program was built with, or one of the same name if it was carried to another machine.
inline std::string find_mpirun(int n) {
#if !defined(USE_MPI)
    die(EXIT_BAD_INPUT, "--ranks %d: this program was built without MPI; install libopenmpi-dev, or give make "
        "OPENMPI_DIR=path, and build again", n);
#endif
    std::string mpirun;
#if defined(MPIRUN)
    mpirun = MPIRUN;
#endif
    if (mpirun.empty() || access(mpirun.c_str(), X_OK) != 0) { mpirun = find_in_path("mpirun"); }
    check(!mpirun.empty(), "--ranks %d: found no mpirun; install openmpi-bin, or that of the MPI that this program was "
          "built with", n);
    return mpirun;
}

// The program and its flags without --ranks N
inline Names without_ranks(const Names& words) {
    Names left;
    for (size_t i = 0; i < words.size(); i++) {
        if (words[i] == "--ranks") { i++; continue; }
        left.push_back(words[i]);
    }
    char path[PATH_MAX] = "";
    const bool found_in_path = left[0].find('/') == std::string::npos;
    if (found_in_path && readlink("/proc/self/exe", path, sizeof(path) - 1) > 0) { left[0] = path; }
    return left;
}

// In the child: becomes mpirun.
[[noreturn]] inline void become(const Names& variables, const Names& words) {
    setpgid(0, 0);                          // what a terminal sends reaches the parent alone, which passes it on
    prctl(PR_SET_PDEATHSIG, SIGTERM);       // should the parent be killed
    for (const std::string& v : variables) {
        const size_t equals = v.find('=');
        setenv(v.substr(0, equals).c_str(), v.c_str() + equals + 1, 1);
    }
    const int nothing = open("/dev/null", O_RDONLY);        // in another group than the terminal's: it may not read it
    if (nothing >= 0) { dup2(nothing, 0); }
    std::vector<char*> argv;
    for (const std::string& w : words) { argv.push_back((char*)w.c_str()); }
    argv.push_back(nullptr);
    execv(argv[0], argv.data());
    fprintf(stderr, "error: %s: %s\n", argv[0], strerror(errno));
    _exit(EXIT_DEVICE);
}

// Runs `program` as n processes under mpirun and returns its exit code, 128 + number when a signal ended it. The
// signals that ask a run to save and end are passed on as SIGUSR1, because mpirun keeps SIGTERM and SIGINT to itself
// and ends the processes; a second SIGINT makes it do that.
inline int run_under_mpirun(int n, const Names& program) {
    const std::string mpirun = find_mpirun(n);
    MpirunWords w = mpirun_words(n);
    say("--ranks %d: %s", n, mpirun_line(n, program, mpirun).c_str());
    Names words = {mpirun};
    words.insert(words.end(), w.flags.begin(), w.flags.end());
    words.insert(words.end(), program.begin(), program.end());
    sigset_t awaited, before;
    sigemptyset(&awaited);
    for (int number : {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGXCPU, SIGCHLD}) {
        struct sigaction action = {};
        sigaction(number, nullptr, &action);
        if (action.sa_handler != SIG_IGN) { sigaddset(&awaited, number); }      // nohup ignores SIGHUP
    }
    sigprocmask(SIG_BLOCK, &awaited, &before);
    fflush(stdout);
    const pid_t child = fork();
    if (child < 0) { die(EXIT_DEVICE, "--ranks: fork: %s", strerror(errno)); }
    if (child == 0) {
        sigprocmask(SIG_SETMASK, &before, nullptr);
        become(w.variables, words);
    }
    for (int interrupts = 0, status = 0;;) {
        int number = 0;
        if (sigwait(&awaited, &number) != 0) { continue; }
        interrupts += number == SIGINT;
        if (number != SIGCHLD) { kill(child, interrupts > 1 ? SIGTERM : SIGUSR1); }
        if (waitpid(child, &status, WNOHANG) != child) { continue; }
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
}

#endif
