// ranks/launch.h -- who started this process, and as which rank: launchers set environment variables.
//
// A launcher that is recognized but cannot work is refused, with the line to type. Otherwise each of its processes
// would train on all of the data, and all would write to the same --out.
#pragma once

#include "../../base/parse.h"

// by: "mpirun" also stands for srun with PMI; empty if there is no launcher
struct Launch {
    const char* by = "";
    int rank = 0, size = 1;
    int local_rank = 0;                     // among the processes of this machine
    bool mpi = false;                       // the launcher has prepared MPI_Init
    int local_size = 1;                     // 0 = unknown until MPI tells
    // without MPI: where rank 0 listens, the name of the run, and the secret that its ranks share
    std::string host = "", run = "";
    std::string secret = "";
    int port = 0;                           // 0 = unknown
    int listener = -1;                      // rank 0's socket, if it listens already
};

// The variables of the launchers, in order of precedence: under mpirun inside a batch job, and torchrun as the only
// task of a node, the variables of Slurm are set, too. A launcher is recognized by its size, and also by its rank if
// other programs set the size as well; a missing local rank is 0.
//
//   started by                           the ranks talk by      rank 0 listens at
//   mpirun, srun --mpi=pmix or pmi2      MPI                    -
//   srun --mpi=none                      TCP                    the step's first node : a port made of job and step
//   torchrun; a pod of Kubernetes        TCP                    MASTER_ADDR : MASTER_PORT + 1
//   --ranks N (fork.h)                   TCP                    127.0.0.1 : a free port
struct LauncherRow { const char *by, *size, *rank, *local_rank, *local_size; bool rank_needed, mpi; };
constexpr LauncherRow LAUNCHERS[] = {
    {"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", false, true},
    {"mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", false, true},          // and --mpi=pmi2
    {"srun --mpi=pmix", "SLURM_STEP_NUM_TASKS", "PMIX_RANK", "SLURM_LOCALID", "", true, true},
    {"torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", true, false},
    {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "", true, false},
};

// The first of Slurm's "node[07-09,12],login": node07
inline std::string first_node(const std::string& list) {
    std::string name;
    bool inside = false, skip = false;      // between brackets; after their first number
    for (char c : list) {
        if (c == ',' && !inside) { break; }
        if (c == '[' || c == ']') { inside = c == '['; skip = false; continue; }
        skip = skip || (inside && (c == '-' || c == ','));
        if (!skip) { name += c; }
    }
    return name;
}

// Where ranks without MPI meet, if the launcher tells. get(name): as below
template <class Get> void find_meeting(Launch& l, Get get) {
    const auto text = [&](const char* name) { return std::string(get(name) != nullptr ? get(name) : ""); };
    const auto number = [&](const char* name, int highest) {
        int n = 0;
        return parse_value(text(name), between(1, highest), n) ? n : 0;
    };
    l.secret = text("CABLE_SECRET");
    if (strcmp(l.by, "torchrun") == 0) {
        const int port = number("MASTER_PORT", 65534);
        l.host = text("MASTER_ADDR");
        if (l.host.empty() || port == 0) { return; }
        l.port = port + 1;
        // after a restart, the ranks must not meet those from before
        const std::string id = text("TORCHELASTIC_RUN_ID"), times = text("TORCHELASTIC_RESTART_COUNT");
        l.run = strprintf("torchrun %s at %s:%d", id.c_str(), l.host.c_str(), port);
        if (!times.empty() && times != "0") { l.run += ", restart " + times; }
    } else if (text("SLURM_STEP_NUM_TASKS") == std::to_string(l.size) &&
               text("SLURM_PROCID") == std::to_string(l.rank)) {
        // also srun --mpi=pmi2 and pmix, for a build without MPI
        const int job = number("SLURM_JOB_ID", INT_MAX), step = number("SLURM_STEP_ID", INT_MAX);
        l.host = first_node(text("SLURM_STEP_NODELIST"));
        if (number("SLURM_STEP_NUM_NODES", INT_MAX) == 1) { l.host = "127.0.0.1"; }
        if (l.host.empty() || job == 0) { return; }
        l.port = 20000 + (int)((7 * (int64_t)job + step) % 12000);      // below the ephemeral ports
        l.run = strprintf("Slurm's step %d.%d", job, step);
    }
}

// get(name): the value of an environment variable, or null. Dies if a variable is set to something else than a number:
// a rank that does not know its size would train alone.
template <class Get> Launch find_launch(Get get) {
    const auto number = [&](const char* name, int lowest, int otherwise) {
        const char* text = *name == '\0' ? nullptr : get(name);
        int n = otherwise;
        check(text == nullptr || parse_value(text, at_least(lowest), n), "%s='%s' in the environment: expected an int "
              ">= %d, as a launcher sets it; unset it to train alone", name, text, lowest);
        return n;
    };
    for (const LauncherRow& row : LAUNCHERS) {
        Launch l;
        l.size = number(row.size, 1, 0);
        l.rank = number(row.rank, 0, -1);
        l.local_rank = number(row.local_rank, 0, 0);
        l.local_size = number(row.local_size, 1, 0);
        if (l.size == 0 || (row.rank_needed && l.rank < 0)) { continue; }
        if (l.size == 1) { break; }
        l.rank = std::max(l.rank, 0);
        l.by = row.by;
        l.mpi = row.mpi;
        find_meeting(l, get);
        return l;
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
inline std::string launch_refusal(const Launch& l, const Names& program) {
    const std::string line = shell_line(program);
    std::string why = "it does not say where rank 0 listens (MASTER_ADDR, MASTER_PORT; or are WORLD_SIZE and RANK set "
                      "by mistake?)";
    if (strcmp(l.by, "srun") == 0) { why = "it does not say where they run (SLURM_JOB_ID, SLURM_STEP_NODELIST)"; }
    if (l.mpi) { why = "this program was built without MPI (libopenmpi-dev, or make OPENMPI_DIR=path)"; }
    return strprintf("%s started %d processes, each of which would train alone: %s; type: %s --ranks %d, on several "
                     "machines: srun --mpi=none -n %d %s", l.by, l.size, why.c_str(), line.c_str(), l.size, l.size,
                     line.c_str());
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
