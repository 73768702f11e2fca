// One instruction set's copy of the kernels: FERRUM_SET is its name, the compiler's options say what it is.
#include "attention.h"
#include "best.h"
#include "choose.h"
#include "linear.h"
#include "logsumexp.h"

#define FERRUM_JOIN(a, b) a##b
#define FERRUM_NAME(set) FERRUM_JOIN(kernels_, set)
#define FERRUM_TEXT(set) #set
#define FERRUM_STRING(set) FERRUM_TEXT(set)

namespace ferrum {
extern const Kernels FERRUM_NAME(FERRUM_SET);
const Kernels FERRUM_NAME(FERRUM_SET) = {
    FERRUM_STRING(FERRUM_SET), kHasPanels ? kPanel : 0, linear, prepare, widen, attend, join, write,
    sum_exponentials, choose, find_largest};
}  // namespace ferrum
