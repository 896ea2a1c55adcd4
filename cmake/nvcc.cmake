# Which nvcc compiles the CUDA backend, where neither CMAKE_CUDA_COMPILER nor CUDACXX says it. The
# runtime of CUDA 12 works with older drivers than that of CUDA 13, as TensorFlow's own does: the
# newest nvcc 12 in ROOT counts, and otherwise what CMake finds.
function(sok_choose_nvcc ROOT)
  if(CMAKE_CUDA_COMPILER OR NOT "$ENV{CUDACXX}" STREQUAL "")
    return()
  endif()
  file(GLOB found "${ROOT}/cuda-12.*/bin/nvcc")
  list(SORT found COMPARE NATURAL ORDER DESCENDING)
  if(found)
    list(GET found 0 newest)
    set(CMAKE_CUDA_COMPILER "${newest}" PARENT_SCOPE)
  endif()
endfunction()
