// ranks/launch.h -- who started this process, and as which rank: launchers set environment variables.
//
// A launcher that is recognized but cannot work is refused, with the line to type. Otherwise each of its processes
// would train on all of the data, and all would write to the same --out.
#pragma once

#include "../../base/device.h"
#include "../../base/parse.h"

// by: "mpirun" also stands for srun with PMI; empty if there is no launcher
struct Launch {
    const char* by = "";
    int rank = 0, size = 1;
    bool mpi = false;                       // the launcher has prepared MPI_Init
    std::vector<int> sockets;               // of --ranks N (fork.h): to each of the other ranks
};

// The variables of the launchers, in order of precedence: under mpirun inside a batch job, and torchrun as the only
// task of a node, the variables of Slurm are set, too. A launcher is recognized by its size, and also by its rank if
// other programs set the size as well. Only MPI connects what a launcher starts; the last two are refused.
struct LauncherRow { const char *by, *size, *rank; bool rank_needed, mpi; };
constexpr LauncherRow LAUNCHERS[] = {
    {"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", false, true},
    {"mpirun", "PMI_SIZE", "PMI_RANK", false, true},                    // of MPICH; and srun --mpi=pmi2
    {"srun --mpi=pmix", "SLURM_STEP_NUM_TASKS", "PMIX_RANK", true, true},
    {"torchrun (WORLD_SIZE, RANK)", "WORLD_SIZE", "RANK", true, false},         // and pods of Kubernetes
    {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", true, false},
};

// get(name): the value of an environment variable, or null. Dies if a variable is set to something else than a number:
// a rank that does not know its size would train alone.
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
// lines to type

// quoted for a shell
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
    for (size_t i = 1; i + 1 < program.size(); i++) {       // a task of each node would start --gpus 8
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
