// What the fake driver offers the emulator, TensorFlow's device memory, and the tests.
#ifndef SOK_TESTS_FAKE_GPU_DRIVER_H_
#define SOK_TESTS_FAKE_GPU_DRIVER_H_

extern "C" {
// The host may touch device memory in between. They nest.
void sok_fake_gpu_open();
void sok_fake_gpu_close();
// The kernels that TensorFlow has launched since the last call, one per line.
const char* sok_fake_gpu_launched();
bool sok_fake_gpu_holds(const void* pointer);
}

#endif  // SOK_TESTS_FAKE_GPU_DRIVER_H_
