// libhccl between processes of one machine: mailboxes in POSIX shared memory, one for each ordered pair of ranks.
//
// A collective is a set of transfers between pairs, driven until all are done; calls are synchronous and in order.
// With EMULATED_NPU_LOG=PREFIX every call appends a line to PREFIX.<process>.

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "call_log.hpp"

#define API extern "C" __attribute__((visibility("default")))
using Status = int;

namespace {

constexpr Status kOk = 0, kMemory = 3, kInternal = 4, kUnsupported = 5, kTimeout = 9;
constexpr size_t kChunk = 256 << 10, kRootInfoBytes = 4108, kNameBytes = 128;
constexpr double kPatienceSeconds = 120;

enum Dtype { kInt8, kInt16, kInt32, kFp16, kFp32, kInt64, kUint64, kUint8, kUint16, kUint32, kFp64, kBf16 };
constexpr size_t kBytes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
enum Reduction { kSum, kProduct, kMax, kMin };

struct Mailbox {
    std::atomic<uint32_t> bytes;  // 0: empty, the sender may write
    char padding[60];
    char content[kChunk];
};

struct Shared {
    std::atomic<uint32_t> arrived;
    char padding[60];
    Mailbox boxes[];
};

struct Communicator {
    uint32_t size, rank;
    std::string name;
    Shared* shared;
    size_t bytes;

    Mailbox& box(uint32_t from, uint32_t to) { return shared->boxes[from * size + to]; }
};

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

// Ranks share cores with those they wait for: one that only yields would take its share of them all the same.
void rest(double waited_seconds) {
    const timespec moment{0, 50'000};
    if (waited_seconds < 20e-6) sched_yield();
    else nanosleep(&moment, nullptr);
}

void log_call(const char* name, uint64_t count, int dtype, const Communicator& one) {
    FILE* file = call_log();
    if (!file) return;
    fprintf(file, "EMULATED %s rank=%u of=%u count=%lu dtype=%d\n", name, one.rank, one.size, (unsigned long)count, dtype);
    fflush(file);
}

Status attach(const std::string& name, uint32_t size, uint32_t rank, void** made) {
    const size_t bytes = sizeof(Shared) + size_t(size) * size * sizeof(Mailbox);
    const std::string path = "/" + name;
    int file = shm_open(path.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, bytes)) return kInternal;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return kMemory;
    auto* one = new Communicator{size, rank, name, static_cast<Shared*>(memory), bytes};
    one->shared->arrived++;
    for (double start = now(); one->shared->arrived < size; rest(now() - start)) {
        if (now() - start > kPatienceSeconds) {
            fprintf(stderr, "EMULATED hccl: %u of %u ranks came to %s\n", one->shared->arrived.load(), size, name.c_str());
            shm_unlink(path.c_str());
            return kTimeout;
        }
    }
    if (rank == 0) shm_unlink(path.c_str());  // everybody has it open; the name goes with nobody left to remove it
    *made = one;
    return kOk;
}

struct Transfer {
    bool sends;
    uint32_t peer;
    char* data;
    size_t left;
};

// One step of a transfer. Returns whether anything moved.
bool advance(Communicator& one, Transfer& t) {
    Mailbox& box = t.sends ? one.box(one.rank, t.peer) : one.box(t.peer, one.rank);
    const uint32_t filled = box.bytes.load(std::memory_order_acquire);
    if (t.sends == (filled > 0)) return false;
    const size_t bytes = t.sends ? (t.left < kChunk ? t.left : kChunk) : filled;
    if (bytes > t.left) {
        fprintf(stderr, "EMULATED hccl: rank %u sent rank %u more than it wanted; calls are out of order\n", t.peer, one.rank);
        abort();
    }
    if (t.sends) memcpy(box.content, t.data, bytes);
    else memcpy(t.data, box.content, bytes);
    box.bytes.store(t.sends ? bytes : 0, std::memory_order_release);
    t.data += bytes;
    t.left -= bytes;
    return true;
}

// Transfers of one direction with one peer share a mailbox: the earlier goes first.
bool must_wait(const std::vector<Transfer>& all, size_t place) {
    for (size_t i = 0; i < place; i++)
        if (all[i].left && all[i].sends == all[place].sends && all[i].peer == all[place].peer) return true;
    return false;
}

Status run(Communicator& one, std::vector<Transfer> all) {
    double last = now();
    for (;;) {
        bool left = false, moved = false;
        for (size_t i = 0; i < all.size(); i++) {
            if (!all[i].left) continue;
            left = true;
            if (!must_wait(all, i)) moved |= advance(one, all[i]);
        }
        if (!left) return kOk;
        if (moved) last = now();
        else if (now() - last > kPatienceSeconds) {
            fprintf(stderr, "EMULATED hccl: rank %u of %u waited %g s for the others\n", one.rank, one.size, kPatienceSeconds);
            return kTimeout;
        } else rest(now() - last);
    }
}

// Send `from(peer)` to and receive into `into(peer)` from every other rank.
template <class From, class Into, class Bytes, class ToBytes>
Status exchange(Communicator& one, From from, Bytes bytes_out, Into into, ToBytes bytes_in) {
    std::vector<Transfer> all;
    for (uint32_t peer = 0; peer < one.size; peer++) {
        if (peer == one.rank) continue;
        all.push_back({true, peer, from(peer), bytes_out(peer)});
        all.push_back({false, peer, into(peer), bytes_in(peer)});
    }
    return run(one, std::move(all));
}

struct Half {
    uint16_t bits;
    operator float() const { _Float16 x; memcpy(&x, &bits, 2); return float(x); }
    Half& operator=(float value) { _Float16 x = _Float16(value); return memcpy(&bits, &x, 2), *this; }
};

struct Brain {
    uint16_t bits;
    operator float() const { uint32_t wide = uint32_t(bits) << 16; float x; return memcpy(&x, &wide, 4), x; }
    Brain& operator=(float value) {
        uint32_t wide;
        memcpy(&wide, &value, 4);
        const bool is_nan = (wide & 0x7fffffff) > 0x7f800000;
        bits = is_nan ? 0x7fc0 : uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);  // to nearest, ties to even
        return *this;
    }
};

template <class T, class Wide = T>
void reduce(void* into, const void* other, uint64_t count, int how) {
    T* a = static_cast<T*>(into);
    const T* b = static_cast<const T*>(other);
    for (uint64_t i = 0; i < count; i++) {
        const Wide x = a[i], y = b[i];
        a[i] = how == kSum ? Wide(x + y) : how == kProduct ? Wide(x * y) : how == kMax ? (x > y ? x : y) : (x < y ? x : y);
    }
}

Status reduce(void* into, const void* other, uint64_t count, int dtype, int how) {
    switch (dtype) {
        case kInt8: reduce<int8_t>(into, other, count, how); return kOk;
        case kInt16: reduce<int16_t>(into, other, count, how); return kOk;
        case kInt32: reduce<int32_t>(into, other, count, how); return kOk;
        case kInt64: reduce<int64_t>(into, other, count, how); return kOk;
        case kUint8: reduce<uint8_t>(into, other, count, how); return kOk;
        case kFp32: reduce<float>(into, other, count, how); return kOk;
        case kFp16: reduce<Half, float>(into, other, count, how); return kOk;
        case kBf16: reduce<Brain, float>(into, other, count, how); return kOk;
    }
    fprintf(stderr, "EMULATED hccl: reduction of dtype %d is not emulated\n", dtype);
    return kUnsupported;
}

// Sum (or other reduction) of every rank's `count` numbers that `mine(rank)` points at, in rank order on every rank.
template <class Mine>
Status reduced(Communicator& one, Mine mine, char* out, uint64_t count, int dtype, int how) {
    const size_t bytes = count * kBytes[dtype];
    std::vector<char> parts(bytes * one.size + 1);
    memcpy(&parts[one.rank * bytes], mine(one.rank), bytes);
    auto size = [&](uint32_t) { return bytes; };
    Status status = exchange(one, mine, size, [&](uint32_t peer) { return &parts[peer * bytes]; }, size);
    for (uint32_t rank = 1; rank < one.size && status == kOk; rank++)
        status = reduce(parts.data(), &parts[rank * bytes], count, dtype, how);
    memcpy(out, parts.data(), bytes);
    return status;
}

Communicator& of(void* handle) { return *static_cast<Communicator*>(handle); }

}  // namespace

API Status HcclGetRootInfo(char* info) {
    timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    memset(info, 0, kRootInfoBytes);
    snprintf(info, kNameBytes, "emulated_hccl_%d_%ld_%ld", getpid(), long(t.tv_sec), t.tv_nsec);
    return kOk;
}
API Status HcclCommInitRootInfo(uint32_t size, const char* info, uint32_t rank, void** made) { return attach(info, size, rank, made); }
API Status HcclCommInitRootInfoConfig(uint32_t size, const char* info, uint32_t rank, const void*, void** made) {
    return attach(info, size, rank, made);
}
API Status HcclCreateSubCommConfig(void**, uint32_t, uint32_t*, uint64_t, uint32_t, void*, void**) {
    fprintf(stderr, "EMULATED hccl: splitting a communicator is not emulated\n");
    return kUnsupported;
}
API Status HcclCommDestroy(void* handle) {
    munmap(of(handle).shared, of(handle).bytes);
    delete &of(handle);
    return kOk;
}
API Status HcclGetCommAsyncError(void*, Status* error) { return *error = kOk, kOk; }
API Status HcclGetCommName(void* handle, char* name) { return strcpy(name, of(handle).name.c_str()), kOk; }
API Status HcclGetRankSize(void* handle, uint32_t* size) { return *size = of(handle).size, kOk; }
API Status HcclGetRankId(void* handle, uint32_t* rank) { return *rank = of(handle).rank, kOk; }
API uint32_t HcclGetCommConfigCapability() { return 4; }
API Status HcclSetConfig(int, int) { return kOk; }
API Status HcclGetConfig(int, int* value) { return *value = 0, kOk; }
API const char* HcclGetErrorString(Status) { return "EMULATED hccl"; }

API Status HcclAllReduce(void* in, void* out, uint64_t count, int dtype, int how, void* handle, void*) {
    log_call("AllReduce", count, dtype, of(handle));
    return reduced(of(handle), [&](uint32_t) { return static_cast<char*>(in); }, static_cast<char*>(out), count, dtype, how);
}

API Status HcclReduceScatter(void* in, void* out, uint64_t count, int dtype, int how, void* handle, void*) {
    log_call("ReduceScatter", count, dtype, of(handle));
    const size_t bytes = count * kBytes[dtype];
    auto part = [&](uint32_t rank) { return static_cast<char*>(in) + rank * bytes; };
    return reduced(of(handle), part, static_cast<char*>(out), count, dtype, how);
}

API Status HcclAllGather(void* in, void* out, uint64_t count, int dtype, void* handle, void*) {
    Communicator& one = of(handle);
    log_call("AllGather", count, dtype, one);
    const size_t bytes = count * kBytes[dtype];
    auto part = [&](uint32_t rank) { return static_cast<char*>(out) + rank * bytes; };
    auto size = [&](uint32_t) { return bytes; };
    memmove(part(one.rank), in, bytes);
    return exchange(one, [&](uint32_t) { return part(one.rank); }, size, part, size);
}

API Status HcclBroadcast(void* data, uint64_t count, int dtype, uint32_t root, void* handle, void*) {
    Communicator& one = of(handle);
    log_call("Broadcast", count, dtype, one);
    const size_t bytes = count * kBytes[dtype];
    auto where = [&](uint32_t) { return static_cast<char*>(data); };
    auto out = [&](uint32_t) { return one.rank == root ? bytes : 0; };
    auto in = [&](uint32_t peer) { return peer == root ? bytes : 0; };
    return exchange(one, where, out, where, in);
}

API Status HcclAlltoAllV(const void* in, const uint64_t* out_counts, const uint64_t* out_starts, int dtype, void* out,
                         const uint64_t* in_counts, const uint64_t* in_starts, int, void* handle, void*) {
    Communicator& one = of(handle);
    log_call("AlltoAllV", out_counts[one.rank], dtype, one);
    const size_t each = kBytes[dtype];
    auto from = [&](uint32_t peer) { return (char*)in + out_starts[peer] * each; };
    auto into = [&](uint32_t peer) { return static_cast<char*>(out) + in_starts[peer] * each; };
    memmove(into(one.rank), from(one.rank), out_counts[one.rank] * each);
    return exchange(one, from, [&](uint32_t peer) { return out_counts[peer] * each; }, into,
                    [&](uint32_t peer) { return in_counts[peer] * each; });
}

API Status HcclAlltoAll(const void* in, uint64_t count, int dtype, void* out, uint64_t, int, void* handle, void* stream) {
    std::vector<uint64_t> counts(of(handle).size, count), starts(of(handle).size);
    for (size_t i = 0; i < starts.size(); i++) starts[i] = i * count;
    return HcclAlltoAllV(in, counts.data(), starts.data(), dtype, out, counts.data(), starts.data(), dtype, handle, stream);
}

API Status HcclSend(void* data, uint64_t count, int dtype, uint32_t peer, void* handle, void*) {
    log_call("Send", count, dtype, of(handle));
    return run(of(handle), {{true, peer, static_cast<char*>(data), count * kBytes[dtype]}});
}
API Status HcclRecv(void* data, uint64_t count, int dtype, uint32_t peer, void* handle, void*) {
    log_call("Recv", count, dtype, of(handle));
    return run(of(handle), {{false, peer, static_cast<char*>(data), count * kBytes[dtype]}});
}

struct BatchItem {
    int receives;
    void* data;
    uint64_t count;
    int dtype;
    uint32_t peer;
};

API Status HcclBatchSendRecv(BatchItem* items, uint32_t count, void* handle, void*) {
    log_call("BatchSendRecv", count, items[0].dtype, of(handle));
    std::vector<Transfer> all;
    for (BatchItem* item = items; item < items + count; item++)
        all.push_back({!item->receives, item->peer, static_cast<char*>(item->data), item->count * kBytes[item->dtype]});
    return run(of(handle), std::move(all));
}

API Status HcclBarrier(void* handle, void* stream) {
    int32_t nothing = 0;
    return HcclAllReduce(&nothing, &nothing, 1, kInt32, kSum, handle, stream);
}
