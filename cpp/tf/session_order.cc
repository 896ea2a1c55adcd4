// Turns of exchanges in a `tf.compat.v1` session, one after the other in the order of the program.
//
//     SokTurn (begins 1) -> .. -> SokTurn (ends 1) ---> SokTurn (begins 2) -> .. -> SokTurn (ends 2)
//                                                  added
//
// TensorFlow orders ops on one resource in functions, not in graphs that a session runs: there it
// runs what is fetched, when its inputs are there. A program cannot order such ops itself, since an
// op that waits for another has it run. So edges are added to what is left of a graph when all that
// is not fetched has been taken out.
#include <map>
#include <vector>

#include "cpp/tf/common.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/graph/algorithm.h"
#include "tensorflow/core/graph/graph.h"

namespace sok {

namespace {

using tensorflow::Graph;
using tensorflow::Node;

struct Turn {
  Node* begin = nullptr;
  std::vector<Node*> ends;
};

// By number, which grows as the program makes them.
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

}  // namespace

class OrderTurns : public tensorflow::GraphOptimizationPass {
 public:
  absl::Status Run(const tensorflow::GraphOptimizationPassOptions& options) override {
    if (options.graph == nullptr || options.is_function_graph) return absl::OkStatus();
    Graph* const graph = options.graph->get();
    const Turn* last = nullptr;
    const std::map<int64_t, Turn> turns = TurnsOf(*graph);
    for (const auto& [number, turn] : turns) {
      if (turn.begin == nullptr || turn.ends.empty()) continue;
      // A turn that what follows depends on the other way round, by the program's own doing.
      const bool against = last != nullptr && Reaches(*graph, turn.begin, last->ends);
      if (against) continue;
      if (last != nullptr) {
        for (Node* const end : last->ends) graph->AddControlEdge(end, turn.begin);
      }
      last = &turn;
    }
    return absl::OkStatus();
  }
};
REGISTER_OPTIMIZATION(tensorflow::OptimizationPassRegistry::POST_REWRITE_FOR_EXEC, 1, OrderTurns);

}  // namespace sok
