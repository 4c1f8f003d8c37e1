// libascendcl on host memory: devices, memory, streams and events, enough for torch_npu to start and to keep tensors.
//
// Signatures are those of the public runtime API of CANN; torch_npu finds the functions by name. "Device" memory is
// host memory, every stream is synchronous, and each process has its cards to itself.
//
// EMULATED_NPU_COUNT  cards (2)          EMULATED_NPU_SOC  name of the chip (Ascend910B3)
// EMULATED_NPU_MIB    memory of a card (65536)

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>

#define API extern "C" __attribute__((visibility("default")))
using Status = int;

namespace {

constexpr Status kOk = 0, kNoContext = 107002, kUnsupported = 207000, kOutOfMemory = 207001;
constexpr size_t kMiB = size_t(1) << 20, kAlignment = 512;

long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text ? atol(text) : otherwise;
}

size_t total_memory() { return size_t(setting("EMULATED_NPU_MIB", 64 * 1024)) * kMiB; }

thread_local int current_device = 0;
thread_local bool device_is_set = false;

std::mutex guard;
std::map<int, size_t> used;                           // bytes by device
std::map<void*, std::pair<int, size_t>> allocations;  // device and bytes by address

// Whether `bytes` more fit on the current device; if so they count as taken.
bool take(size_t bytes) {
    size_t& taken = used[current_device];
    if (taken + bytes > total_memory()) return false;
    taken += bytes;
    return true;
}

Status unsupported(const char* name) {
    fprintf(stderr, "EMULATED runtime: %s is not emulated\n", name);
    return kUnsupported;
}

}  // namespace

// -- process and devices -----------------------------------------------------------------------------------------

API Status aclInit(const char*) { return kOk; }
API Status aclFinalize() { return kOk; }
API const char* aclGetRecentErrMsg() { return "EMULATED runtime: there is no NPU here"; }
API void aclAppLog(int, const char*, const char*, uint32_t, const char*, ...) {}
API Status aclsysGetVersionStr(char*, char* version) { return strcpy(version, "8.5.0"), kOk; }

API const char* aclrtGetSocName() {
    const char* name = getenv("EMULATED_NPU_SOC");
    return name ? name : "Ascend910B3";
}

API Status aclrtGetDeviceCount(uint32_t* count) { return *count = setting("EMULATED_NPU_COUNT", 2), kOk; }
API Status aclrtSetDevice(int32_t device) { return current_device = device, device_is_set = true, kOk; }
API Status aclrtResetDevice(int32_t) { return kOk; }

API Status aclrtGetDevice(int32_t* device) {
    if (!device_is_set) return kNoContext;
    *device = current_device;
    return kOk;
}

// A context is its device's number, in the clothes of a pointer.
API Status aclrtGetCurrentContext(void** context) {
    *context = reinterpret_cast<void*>(uintptr_t(current_device) + 1);
    return kOk;
}
API Status aclrtSetCurrentContext(void* context) { return aclrtSetDevice(int32_t(reinterpret_cast<uintptr_t>(context) - 1)); }
API Status aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) { return *flags = 0, *active = 1, kOk; }

API Status aclGetDeviceCapability(uint32_t, int item, int64_t* value) { return *value = item == 0, kOk; }

API Status aclrtGetDeviceInfo(uint32_t, int item, int64_t* value) {
    constexpr int kAiCores = 101, kCubeCores = 102, kVectorCores = 201, kMemory = 301, kCache = 302;
    switch (item) {
        case kAiCores: case kCubeCores: *value = 20; break;
        case kVectorCores: *value = 40; break;
        case kMemory: *value = int64_t(total_memory()); break;
        case kCache: *value = 192 * int64_t(kMiB); break;
        default: *value = 0;
    }
    return kOk;
}

API Status aclrtDeviceGetBareTgid(int32_t* process) { return *process = getpid(), kOk; }
API Status aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) { return *can = 1, kOk; }
API Status aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return kOk; }

// -- memory ------------------------------------------------------------------------------------------------------

API Status aclrtMalloc(void** address, size_t bytes, int) {
    std::lock_guard<std::mutex> lock(guard);
    if (!take(bytes)) return kOutOfMemory;
    if (posix_memalign(address, kAlignment, bytes ? bytes : 1)) return kOutOfMemory;
    allocations[*address] = {current_device, bytes};
    return kOk;
}
API Status aclrtMallocAlign32(void** address, size_t bytes, int policy) { return aclrtMalloc(address, bytes, policy); }

API Status aclrtFree(void* address) {
    if (!address) return kOk;
    std::lock_guard<std::mutex> lock(guard);
    auto found = allocations.find(address);
    used[found->second.first] -= found->second.second;
    allocations.erase(found);
    free(address);
    return kOk;
}

API Status aclrtMallocHost(void** address, size_t bytes) {
    return posix_memalign(address, kAlignment, bytes ? bytes : 1) ? kOutOfMemory : kOk;
}
API Status aclrtMallocHostWithCfg(void** address, uint64_t bytes, void*) { return aclrtMallocHost(address, bytes); }
API Status aclrtFreeHost(void* address) { return free(address), kOk; }

API Status aclrtGetMemInfo(int, size_t* available, size_t* total) {
    std::lock_guard<std::mutex> lock(guard);
    *total = total_memory();
    *available = *total - used[current_device];
    return kOk;
}

API Status aclrtMemcpy(void* to, size_t, const void* from, size_t bytes, int) { return memmove(to, from, bytes), kOk; }
API Status aclrtMemcpyAsync(void* to, size_t, const void* from, size_t bytes, int, void*) { return memmove(to, from, bytes), kOk; }
API Status aclrtMemset(void* to, size_t, int32_t value, size_t bytes) { return memset(to, value, bytes), kOk; }
API Status aclrtMemsetAsync(void* to, size_t, int32_t value, size_t bytes, void*) { return memset(to, value, bytes), kOk; }

// Addresses first, memory later: what expandable segments are made of. A "physical" block is its size and device;
// mapping it makes host pages usable at the reserved address.
namespace {
struct Block {
    int device;
    size_t bytes;
};
std::map<void*, size_t> reserved, mapped;
}  // namespace

API Status aclrtReserveMemAddress(void** address, size_t bytes, size_t, void*, uint64_t) {
    void* found = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return kOutOfMemory;
    std::lock_guard<std::mutex> lock(guard);
    reserved[found] = bytes;
    *address = found;
    return kOk;
}

API Status aclrtReleaseMemAddress(void* address) {
    std::lock_guard<std::mutex> lock(guard);
    munmap(address, reserved[address]);
    reserved.erase(address);
    return kOk;
}

API Status aclrtMallocPhysical(void** handle, size_t bytes, const void*, uint64_t) {
    std::lock_guard<std::mutex> lock(guard);
    if (!take(bytes)) return kOutOfMemory;
    *handle = new Block{current_device, bytes};
    return kOk;
}

API Status aclrtFreePhysical(void* handle) {
    std::lock_guard<std::mutex> lock(guard);
    auto* block = static_cast<Block*>(handle);
    used[block->device] -= block->bytes;
    delete block;
    return kOk;
}

API Status aclrtMapMem(void* address, size_t bytes, size_t, void*, uint64_t) {
    std::lock_guard<std::mutex> lock(guard);
    mapped[address] = bytes;
    return mprotect(address, bytes, PROT_READ | PROT_WRITE) ? kOutOfMemory : kOk;
}

API Status aclrtUnmapMem(void* address) {
    std::lock_guard<std::mutex> lock(guard);
    // Fresh pages without access: the contents are gone, as they are on a card.
    void* at = mmap(address, mapped[address], PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    mapped.erase(address);
    return at == MAP_FAILED ? kOutOfMemory : kOk;
}

API Status aclrtMemExportToShareableHandle(void*, int, uint64_t, uint64_t*) { return unsupported("sharing memory between processes"); }
API Status aclrtMemImportFromShareableHandle(uint64_t, int32_t, void**) { return unsupported("sharing memory between processes"); }
API Status aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) { return unsupported("sharing memory between processes"); }

// -- streams and events: everything happens at once ----------------------------------------------------------------

namespace {
struct Stream {
    int32_t id;
};
struct Event {
    timespec when;
};
int32_t streams = 0;
}  // namespace

API Status aclrtCreateStream(void** stream) { return *stream = new Stream{++streams}, kOk; }
API Status aclrtCreateStreamWithConfig(void** stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }
API Status aclrtDestroyStream(void* stream) { return delete static_cast<Stream*>(stream), kOk; }
API Status aclrtDestroyStreamForce(void* stream) { return aclrtDestroyStream(stream); }
API Status aclrtStreamGetId(void* stream, int32_t* id) { return *id = stream ? static_cast<Stream*>(stream)->id : 0, kOk; }
API Status aclrtSynchronizeStream(void*) { return kOk; }
API Status aclrtSynchronizeStreamWithTimeout(void*, int32_t) { return kOk; }
API Status aclrtSynchronizeDevice() { return kOk; }
API Status aclrtSynchronizeDeviceWithTimeout(int32_t) { return kOk; }
API Status aclrtStreamQuery(void*, int* status) { return *status = 0, kOk; }
API Status aclrtStreamWaitEvent(void*, void*) { return kOk; }
API Status aclrtSetStreamFailureMode(void*, uint64_t) { return kOk; }
API Status aclrtSetStreamOverflowSwitch(void*, uint32_t) { return kOk; }
API Status aclrtGetStreamOverflowSwitch(void*, uint32_t* on) { return *on = 0, kOk; }

API Status aclrtCreateEventExWithFlag(void** event, uint32_t) { return *event = new Event{}, kOk; }
API Status aclrtCreateEventWithFlag(void** event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
API Status aclrtDestroyEvent(void* event) { return delete static_cast<Event*>(event), kOk; }
API Status aclrtRecordEvent(void* event, void*) { return clock_gettime(CLOCK_MONOTONIC, &static_cast<Event*>(event)->when), kOk; }
API Status aclrtResetEvent(void*, void*) { return kOk; }
API Status aclrtSynchronizeEvent(void*) { return kOk; }
API Status aclrtQueryEventStatus(void*, int* status) { return *status = 1, kOk; }
API Status aclrtQueryEventWaitStatus(void*, int* status) { return *status = 0, kOk; }

API Status aclrtEventElapsedTime(float* milliseconds, void* start, void* end) {
    const timespec &a = static_cast<Event*>(start)->when, &b = static_cast<Event*>(end)->when;
    *milliseconds = (b.tv_sec - a.tv_sec) * 1e3f + (b.tv_nsec - a.tv_nsec) * 1e-6f;
    return kOk;
}

API Status aclrtProcessReport(int32_t) { return kOk; }
API Status aclrtSetOpWaitTimeout(uint32_t) { return kOk; }
API Status aclrtSetOpExecuteTimeOut(uint32_t) { return kOk; }
API Status aclrtSetDeviceSatMode(int) { return kOk; }
API Status aclrtPeekAtLastError(int) { return kOk; }
API Status aclrtGetLastError(int) { return kOk; }

// -- the old way to run an operator, which torch_npu's own kernels no longer take: described, never executed ---------

namespace {
struct Description {
    int dtype, format;
    size_t dims;
    int64_t size[16];
};
struct Buffer {
    void* address;
    size_t bytes;
};
}  // namespace

API void* aclCreateTensorDesc(int dtype, int dims, const int64_t* size, int format) {
    auto* made = new Description{dtype, format, size_t(dims), {}};
    memcpy(made->size, size, sizeof(int64_t) * (dims < 16 ? dims : 16));
    return made;
}
API void aclDestroyTensorDesc(const void* one) { delete static_cast<const Description*>(one); }
API int aclGetTensorDescFormat(const void* one) { return static_cast<const Description*>(one)->format; }
API size_t aclGetTensorDescNumDims(const void* one) { return static_cast<const Description*>(one)->dims; }
API int aclGetTensorDescType(const void* one) { return static_cast<const Description*>(one)->dtype; }
API Status aclGetTensorDescDimV2(const void* one, size_t dim, int64_t* size) {
    return *size = static_cast<const Description*>(one)->size[dim], kOk;
}
API void aclSetTensorDescName(void*, const char*) {}
API Status aclSetTensorFormat(void*, int) { return kOk; }
API Status aclSetTensorShape(void*, int, const int64_t*) { return kOk; }
API Status aclSetTensorPlaceMent(void*, int) { return kOk; }
API void* aclCreateDataBuffer(void* address, size_t bytes) { return new Buffer{address, bytes}; }
API Status aclDestroyDataBuffer(const void* buffer) { return delete static_cast<const Buffer*>(buffer), kOk; }
API void* aclopCreateAttr() { return new char; }
API void aclopDestroyAttr(const void* attribute) { delete static_cast<const char*>(attribute); }

#define ACCEPTS(name) API Status name() { return kOk; }
ACCEPTS(aclopSetAttrBool) ACCEPTS(aclopSetAttrDataType) ACCEPTS(aclopSetAttrFloat) ACCEPTS(aclopSetAttrInt)
ACCEPTS(aclopSetAttrListBool) ACCEPTS(aclopSetAttrListFloat) ACCEPTS(aclopSetAttrListInt)
ACCEPTS(aclopSetAttrListListInt) ACCEPTS(aclopSetAttrString)
API Status aclopCompileAndExecute(const char* name) { return unsupported(name); }

// -- what is asked for at start, and never used: dumps, custom kernels, the profiler --------------------------------

#define REFUSES(name) API Status name() { return unsupported(#name); }
REFUSES(aclmdlInitDump) REFUSES(aclmdlSetDump) REFUSES(aclmdlFinalizeDump) REFUSES(aclrtBinaryGetFunction)
REFUSES(aclrtBinaryLoadFromData) REFUSES(aclrtGetFunctionAddr) REFUSES(rtDevBinaryRegister) REFUSES(rtFunctionRegister)
REFUSES(rtGetC2cCtrlAddr) REFUSES(rtKernelLaunch)

API Status MsprofRegisterCallback(uint32_t, void*) { return kOk; }
API uint64_t MsprofSysCycleTime() { return 0; }
API uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
ACCEPTS(MsprofReportAdditionalInfo) ACCEPTS(MsprofReportApi) ACCEPTS(MsprofReportCompactInfo)
