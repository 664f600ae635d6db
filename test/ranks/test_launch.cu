// test_launch.cu -- launch.h: from the variables of each launcher to rank and size, and the lines that are printed.
#include <map>

#include "test/catch.h"
#include "llmc/engine/comm.h"
#include "llmc/engine/launch.h"

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
    const Environment step = with(batch, {{"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_PROCID", "5"}});
    const Environment torch = {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}};
    const Environment open_mpi = {{"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_RANK", "5"}};
    struct { const char* what; Environment environment; const char* by; bool mpi; } rows[] = {
        {"mpirun", open_mpi, "mpirun", true},
        {"mpirun in a batch job", with(batch, open_mpi), "mpirun", true},
        {"mpirun in a step of one task per node",
         with(batch, with({{"SLURM_STEP_NUM_TASKS", "2"}, {"PMIX_RANK", "0"}}, open_mpi)), "mpirun", true},
        {"mpiexec of MPICH", {{"PMI_SIZE", "8"}, {"PMI_RANK", "5"}}, "mpirun", true},
        {"srun --mpi=pmi2", with(step, {{"PMI_SIZE", "8"}, {"PMI_RANK", "5"}}), "mpirun", true},
        {"srun --mpi=pmix", with(step, {{"PMIX_RANK", "5"}}), "srun --mpi=pmix", true},
        {"srun --mpi=none", step, "srun", false},
        {"torchrun, a pod of Kubernetes", torch, "torchrun (WORLD_SIZE, RANK)", false},
        {"torchrun as the only task of each node",
         with(with(batch, {{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}}), torch),
         "torchrun (WORLD_SIZE, RANK)", false},
    };
    for (const auto& row : rows) {
        INFO(row.what);
        const Launch l = found(row.environment);
        CHECK(std::string(l.by) == row.by);
        CHECK((l.rank == 5 && l.size == 8 && l.mpi == row.mpi && l.sockets.empty()));
    }
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

TEST_CASE("launch: a refusal has the line to type", "[launch]") {
    const Names program = {"./train_gpt2", "--gpus", "8", "--out", "my run"};
    struct { Launch launch; const char* wanted; } rows[] = {
        {{"srun", 0, 4, false, {}}, "type: srun --mpi=pmix -n 4 ./train_gpt2 --out 'my run'"},
        {{"torchrun", 0, 4, false, {}}, "type: mpirun -np 4 ./train_gpt2 --out 'my run'"},
        {{"mpirun", 0, 4, true, {}}, "built without MPI: install it (dev/install.sh ranks, or make OPENMPI_DIR=path)"},
    };
    for (const auto& row : rows) {
        const std::string s = launch_refusal(row.launch, program);
        INFO(s);
        CHECK(has(s, std::string(row.launch.by) + " started 4 processes, each of which would train alone: "));
        CHECK(has(s, row.wanted));
        CHECK(has(s, "; on one machine, type: ./train_gpt2 --out 'my run' --ranks 4"));
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
