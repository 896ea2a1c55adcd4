# TensorFlow's real GPU runtime without a GPU (tools/fake_gpu.sh): a driver under all names that
# TensorFlow opens, and the op library with the kernels of device tables, emulated, for its device
# "GPU". Against the wheel `tensorflow`, which has CUDA's headers; `tensorflow-cpu` has not.
get_target_property(include tensorflow_framework INTERFACE_INCLUDE_DIRECTORIES)
set(include ${include}/third_party/gpus/cuda/include)
if(NOT EXISTS ${include}/cuda.h)
  return()
endif()
set(folder ${CMAKE_BINARY_DIR}/fake_gpu)
add_library(fake_cuda SHARED EXCLUDE_FROM_ALL cpp/tests/fake_gpu/driver.cc)
target_include_directories(fake_cuda SYSTEM PRIVATE ${include})
target_link_libraries(fake_cuda PRIVATE sok_flags)
set_target_properties(fake_cuda PROPERTIES OUTPUT_NAME cuda SUFFIX .so.1
  LIBRARY_OUTPUT_DIRECTORY ${folder})
foreach(name cudart.so.12 nvidia-ml.so.1 cublas.so.12 cublasLt.so.12 cufft.so.11 cusolver.so.11
        cusparse.so.12 cudnn.so.9)
  add_custom_command(TARGET fake_cuda POST_BUILD
    COMMAND ${CMAKE_COMMAND} -E create_symlink libcuda.so.1 ${folder}/lib${name})
endforeach()
list(TRANSFORM sources REPLACE cpp/tests/emulator/tf_stream.cc cpp/tests/fake_gpu/tf_stream.cc)
add_library(_ops_fake_gpu MODULE EXCLUDE_FROM_ALL ${sources})
set_target_properties(_ops_fake_gpu PROPERTIES PREFIX "")
target_link_libraries(_ops_fake_gpu PRIVATE sok_tf sok_cuda_emulated fake_cuda)
sok_unity(_ops_fake_gpu)
