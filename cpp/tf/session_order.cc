// Orders turns of exchanges in a `tf.compat.v1` session, one after the other as in the program.
//
//     SokTurn (begin 1) -> .. -> SokTurn (end 1) ---> SokTurn (begin 2) -> .. -> SokTurn (end 2)
//                                                added
//
// TensorFlow orders ops on one resource in functions, but not in graphs that a session runs: there
// a fetched op runs as soon as its inputs are ready. A program cannot order such ops itself, since
// a control edge makes TensorFlow run an op that was not fetched. So edges are added to the pruned
// graph, which holds only ops that are needed.
//
// Several iterations of a loop also run at the same time, in any order. A loop with exchanges must
// run one iteration at a time.
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cpp/tf/common.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/graph/algorithm.h"
#include "tensorflow/core/graph/control_flow.h"
#include "tensorflow/core/graph/graph.h"

namespace sok {

namespace {

using tensorflow::Graph;
using tensorflow::Node;

struct Turn {
  Node* begin = nullptr;
  std::vector<Node*> ends;
};

// By number, which grows in program order.
std::map<int64_t, Turn> TurnsOf(const Graph& graph) {
  std::map<int64_t, Turn> turns;
  for (Node* const node : graph.op_nodes()) {
    int64_t number;
    bool ends;
    if (node->type_string() != "SokTurn" || !GetNodeAttr(node->attrs(), "number", &number).ok() ||
        !GetNodeAttr(node->attrs(), "ends", &ends).ok() || number < 0) {
      continue;
    }
    if (ends) {
      turns[number].ends.push_back(node);
    } else {
      turns[number].begin = node;
    }
  }
  return turns;
}

bool Reaches(const Graph& graph, Node* from, const std::vector<Node*>& to) {
  bool reached = false;
  tensorflow::ReverseDFSFrom(graph, to, [&](Node* node) { reached |= node == from; }, nullptr);
  return reached;
}

void Order(const std::map<int64_t, Turn>& turns, Graph* graph) {
  const Turn* last = nullptr;
  for (const auto& [number, turn] : turns) {
    if (turn.begin == nullptr || turn.ends.empty()) continue;
    // The program itself orders these two turns the other way round: an edge would close a cycle.
    const bool against = last != nullptr && Reaches(*graph, turn.begin, last->ends);
    if (against) continue;
    if (last != nullptr) {
      for (Node* const end : last->ends) graph->AddControlEdge(end, turn.begin);
    }
    last = &turn;
  }
}

// Makes loops that contain a wait for other ranks, and the loops around them, run one iteration at
// a time.
absl::Status OneIterationAtATime(Graph* graph) {
  std::vector<const Node*> waits;
  for (const Node* const node : graph->op_nodes()) {
    if (node->type_string() == "SokBeginWait") waits.push_back(node);
  }
  if (waits.empty()) return absl::OkStatus();
  std::vector<tensorflow::ControlFlowInfo> info;
  TF_RETURN_IF_ERROR(tensorflow::BuildControlFlowInfo(graph, &info));
  std::set<std::string> loops;  // names of frames
  for (const Node* node : waits) {
    while (!info[node->id()].frame_name.empty()) {
      loops.insert(info[node->id()].frame_name);
      node = info[node->id()].parent_frame;
    }
  }
  for (Node* const node : graph->op_nodes()) {
    if (!node->IsEnter() || loops.count(info[node->id()].frame_name) == 0) continue;
    node->ClearAttr("parallel_iterations");
    node->AddAttr("parallel_iterations", 1);
  }
  return absl::OkStatus();
}

}  // namespace

class OrderTurns : public tensorflow::GraphOptimizationPass {
 public:
  absl::Status Run(const tensorflow::GraphOptimizationPassOptions& options) override {
    if (options.graph == nullptr || options.is_function_graph) return absl::OkStatus();
    Graph* const graph = options.graph->get();
    Order(TurnsOf(*graph), graph);
    return OneIterationAtATime(graph);
  }
};
REGISTER_OPTIMIZATION(tensorflow::OptimizationPassRegistry::POST_REWRITE_FOR_EXEC, 1, OrderTurns);

}  // namespace sok
