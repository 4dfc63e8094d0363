// The build compiles this file once a level, as it does level.cpp.
#include "exponential.h"

#include "exponentials.h"

#define OCTAVO_JOINED(level) level##_exponential
#define OCTAVO_FUNCTION(level) OCTAVO_JOINED(level)

namespace trial {

void OCTAVO_FUNCTION(OCTAVO_LEVEL)(const float* x, int64_t count, float* y) {
    for (int64_t i = 0; i < count; i += octavo::LANES) {
        const int64_t some = octavo::least_of<int64_t>(octavo::LANES, count - i);
        octavo::store_f32(y + i, octavo::exponential(octavo::load_f32(x + i, some)), some);
    }
}

}  // namespace trial
