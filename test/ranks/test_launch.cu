// test_launch.cu -- launch.h: from the variables of each launcher to rank, size and meeting place, and the lines that
// are printed.
#include <map>

#include "test/catch.h"
#include "llmc/engine/ranks/comm.h"
#include "llmc/engine/ranks/fork.h"

namespace {
using Environment = std::map<std::string, std::string>;

Launch found(const Environment& environment) {
    return find_launch([&](const char* name) {
        const auto at = environment.find(name);
        return at == environment.end() ? nullptr : at->second.c_str();
    });
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// what a batch job of 2 nodes sets for everything that runs in it
const Environment batch = {{"SLURM_JOB_ID", "77"}, {"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"},
                           {"SLURM_LOCALID", "0"}, {"SLURM_NNODES", "2"}};
Environment with(Environment base, const Environment& more) {
    for (const auto& item : more) { base[item.first] = item.second; }
    return base;
}
} // namespace

TEST_CASE("launch: every launcher is recognised by its variables", "[launch]") {
    const Environment step = with(batch, {{"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_PROCID", "5"},
                                          {"SLURM_LOCALID", "1"}});
    const Environment torch = {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}};
    const Environment open_mpi = {{"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_RANK", "5"},
                                  {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
    const Environment hydra = {{"PMI_SIZE", "8"}, {"PMI_RANK", "5"}, {"MPI_LOCALRANKID", "1"},
                               {"MPI_LOCALNRANKS", "4"}};
    struct { const char* what; Environment environment; const char* by; bool mpi; int local_size; } rows[] = {
        {"mpirun", open_mpi, "mpirun", true, 4},
        {"mpirun in a batch job", with(batch, open_mpi), "mpirun", true, 4},
        {"mpirun in a step of one task per node",
         with(batch, with({{"SLURM_STEP_NUM_TASKS", "2"}, {"PMIX_RANK", "0"}}, open_mpi)), "mpirun", true, 4},
        {"mpiexec of MPICH", hydra, "mpirun", true, 4},
        {"srun --mpi=pmi2", with(step, {{"PMI_SIZE", "8"}, {"PMI_RANK", "5"}}), "mpirun", true, 0},
        {"srun --mpi=pmix", with(step, {{"PMIX_RANK", "5"}}), "srun --mpi=pmix", true, 0},
        {"srun --mpi=none", step, "srun", false, 0},
        {"torchrun", torch, "torchrun", false, 4},
        {"a pod of Kubernetes", {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"MASTER_ADDR", "pod-0"}}, "torchrun", false, 0},
        {"torchrun as the only task of each node",
         with(with(batch, {{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}}), torch), "torchrun", false, 4},
    };
    for (const auto& row : rows) {
        INFO(row.what);
        const Launch l = found(row.environment);
        CHECK(std::string(l.by) == row.by);
        CHECK(l.rank == 5);
        CHECK(l.size == 8);
        const bool silent = has(row.what, "pmi2") || has(row.what, "MPICH") || has(row.what, "pod");
        CHECK((silent || l.local_rank == 1));
        CHECK(l.local_size == row.local_size);
        CHECK(l.mpi == row.mpi);
    }
    CHECK(found(hydra).local_rank == 1);
}

TEST_CASE("launch: without a launcher a process is the only rank", "[launch]") {
    struct { const char* what; Environment environment; } rows[] = {
        {"a shell", {}},
        {"the script of a batch job", batch},
        {"a step of one task", with(batch, {{"SLURM_STEP_NUM_TASKS", "1"}})},
        {"mpirun -np 1", {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}}},
        {"mpirun -np 1 in a step of many tasks",
         with(batch, {{"SLURM_STEP_NUM_TASKS", "8"}, {"OMPI_COMM_WORLD_SIZE", "1"}})},
        {"torchrun of one process", {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}}},
        {"a notebook's leftover", {{"WORLD_SIZE", "4"}}},
    };
    for (const auto& row : rows) {
        INFO(row.what);
        const Launch l = found(row.environment);
        CHECK(l.size == 1);
        CHECK(l.rank == 0);
        CHECK(!l.mpi);
    }
}

TEST_CASE("launch: a launcher's variable that is not a number is refused", "[launch]") {
    struct { const char *name, *value; Environment rest; } rows[] = {
        {"RANK", "", {{"WORLD_SIZE", "2"}}},
        {"RANK", "abc", {{"WORLD_SIZE", "2"}}},
        {"RANK", "-1", {}},
        {"RANK", "1.0", {{"WORLD_SIZE", "2"}}},
        {"WORLD_SIZE", "x2", {{"RANK", "0"}}},
        {"WORLD_SIZE", "", {}},
        {"LOCAL_RANK", "a", {{"WORLD_SIZE", "2"}, {"RANK", "0"}}},
        {"SLURM_PROCID", "x", {{"SLURM_STEP_NUM_TASKS", "2"}}},
        {"SLURM_STEP_NUM_TASKS", "0", {{"SLURM_PROCID", "0"}}},
        {"OMPI_COMM_WORLD_SIZE", "2x", {{"OMPI_COMM_WORLD_RANK", "0"}}},
        {"PMI_SIZE", "-4", {}},
    };
    for (const auto& row : rows) {
        const std::string wanted = strprintf("%s='%s'", row.name, row.value);
        INFO(wanted);
        try {
            found(with(row.rest, {{row.name, row.value}}));
            FAIL("it trains alone");
        } catch (const Error& e) {
            CHECK(e.code == EXIT_BAD_INPUT);
            CHECK(has(e.what(), wanted));
        }
    }
}

TEST_CASE("launch: where the ranks meet without MPI", "[launch]") {
    const Environment torch = {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "node3"},
                               {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "none"}, {"CABLE_SECRET", "s"}};
    Launch l = found(torch);
    CHECK(l.secret == "s");
    CHECK(l.host == "node3");
    CHECK(l.port == 29501);
    CHECK(l.run == "torchrun none at node3:29500");
    CHECK(found(with(torch, {{"TORCHELASTIC_RESTART_COUNT", "2"}})).run != l.run);
    CHECK(found(with(torch, {{"TORCHELASTIC_RUN_ID", "other"}})).run != l.run);
    const Environment step = with(batch, {{"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_STEP_ID", "3"}, {"SLURM_PROCID", "5"},
                                          {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_STEP_NODELIST", "gpu[07-08]"}});
    l = found(step);
    CHECK(l.host == "gpu07");
    CHECK(l.port == 20000 + 7 * 77 + 3);
    CHECK(l.run == "Slurm's step 77.3");
    CHECK(found(with(step, {{"SLURM_STEP_NUM_NODES", "1"}})).host == "127.0.0.1");
    CHECK(found(with(step, {{"SLURM_STEP_ID", "4"}})).port != l.port);
    for (const char* job : {"77", "12000", "2147483647"}) {
        const int port = found(with(step, {{"SLURM_JOB_ID", job}})).port;
        CHECK((port >= 20000 && port < 32000));
    }
    // prepared for MPI, but a build without it continues as if it were not
    CHECK(found(with(step, {{"PMIX_RANK", "5"}})).port == l.port);
    CHECK(found(with(step, {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}})).port == l.port);
    // mpirun, which Slurm has started as one task on each of 8 nodes
    CHECK(found(with(step, {{"OMPI_COMM_WORLD_RANK", "5"}, {"OMPI_COMM_WORLD_SIZE", "64"}})).port == 0);
    for (const char* missing : {"SLURM_JOB_ID", "SLURM_STEP_NODELIST"}) {
        CHECK(found(with(step, {{missing, ""}})).port == 0);
    }
    for (const char* missing : {"MASTER_ADDR", "MASTER_PORT"}) { CHECK(found(with(torch, {{missing, ""}})).port == 0); }
    CHECK(found(with(torch, {{"MASTER_PORT", "65535"}})).port == 0);
}

TEST_CASE("launch: the first node of a list", "[launch]") {
    const std::pair<const char*, const char*> lists[] = {
        {"node", "node"}, {"node7,node8", "node7"}, {"gpu[07-09,12],login", "gpu07"}, {"gpu[3,5-8]", "gpu3"},
        {"r[1-2]n[04,06]-ib", "r1n04-ib"}, {"", ""}};
    for (const auto& [list, first] : lists) { CHECK(first_node(list) == first); }
}

TEST_CASE("launch: a refusal has the line to type", "[launch]") {
    const Names program = {"./train_gpt2", "--out", "my run"};
    Launch l;
    l.size = 4;
    for (const char* by : {"srun", "torchrun", "mpirun"}) {
        l.by = by;
        l.mpi = l.by == std::string("mpirun");
        const std::string s = launch_refusal(l, program);
        INFO(s);
        CHECK(has(s, std::string(by) + " started 4 processes"));
        CHECK(has(s, "type: ./train_gpt2 --out 'my run' --ranks 4"));
        CHECK(has(s, "srun --mpi=none -n 4 ./train_gpt2 --out 'my run'"));
        CHECK(has(s, "libopenmpi-dev") == l.mpi);
        CHECK(has(s, "MASTER_ADDR") == (l.by == std::string("torchrun")));
        CHECK(has(s, "SLURM_JOB_ID") == (l.by == std::string("srun")));
    }
}

TEST_CASE("launch: words as a shell takes them", "[launch]") {
    CHECK(shell_line({"a", "b c", "", "it's", "--x=1,2", "$HOME", "d/*.bin"}) ==
          "a 'b c' '' 'it'\\''s' --x=1,2 '$HOME' 'd/*.bin'");
}

TEST_CASE("launch: ranks are summed on each machine first where that is the same tree", "[launch]") {
    const auto found = [](const std::vector<int>& machines) {       // ranks on each, in order
        std::vector<OnMachine> ranks;
        for (int size : machines) { for (int r = 0; r < size; r++) { ranks.push_back({size, r}); } }
        return ranks_of_each_machine(ranks);
    };
    for (int g : {2, 4, 8}) {
        for (size_t machines : {2, 3, 5}) { CHECK(found(std::vector<int>(machines, g)) == g); }
    }
    for (int g : {1, 3, 5, 6, 7, 12}) { CHECK(found({g, g}) == 0); }
    for (const auto& machines : {std::vector<int>{1}, {8}, {4, 2}, {2, 4}, {2, 2, 3}, {1, 2}}) {
        CHECK(found(machines) == 0);
    }
    CHECK(ranks_of_each_machine({{2, 0}, {2, 0}, {2, 1}, {2, 1}}) == 0);     // dealt out in turns
}

TEST_CASE("launch: NCCL is refused for a reason, never left out in silence", "[launch]") {
    CHECK(nccl_refusal(true, {1, 2, 3, 4}).empty());
    CHECK(has(nccl_refusal(false, {1, 2}), "built without NCCL"));
    CHECK(has(nccl_refusal(true, {7, 1, 2, 1, 7}), "ranks 1 and 3 share a GPU"));
}

TEST_CASE("launch: more ranks than cores can carry or memory can hold are refused", "[launch]") {
    const auto refused = [](int n, int cores, double memory, bool crowded) {
        return crowd_refusal(n, cores, memory, crowded);
    };
    const double much = 1e12;
    for (int n : {1, 2}) { CHECK(refused(n, 2, much, false).empty()); }
    for (int n : {3, 16, 17, 1000, 100000, INT_MAX}) {
        CHECK(refused(n, 2, much, true).empty() == (n <= 16));
        CHECK(has(refused(n, 2, much, false), strprintf("--ranks %d: this machine has 2 cores and 1.0 TB", n)));
    }
    const std::string s = refused(1000, 64, 20 * LEAST_RANK, true);
    INFO(s);
    CHECK(has(s, "expected at most 20, or, with CABLE_OVERSUBSCRIBE=1 in the environment, 20 (8 on a core, and 64"));
    CHECK(refused(20, 64, 20 * LEAST_RANK, false).empty());
    CHECK(!refused(21, 64, 20 * LEAST_RANK, false).empty());
    CHECK(!refused(2, 1, 0, true).empty());
}
