// libacl_op_compiler: the options torch_npu sets at start are kept, nothing is compiled.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

namespace {
constexpr size_t kOptionBytes = 64;
int64_t parameters[64];
}  // namespace

API int aclSetCompileopt(int, const char*) { return 0; }
API size_t aclGetCompileoptSize(int) { return kOptionBytes; }
API int aclGetCompileopt(int, char* value, size_t bytes) { return strncpy(value, "disable", bytes), 0; }
API int aclopStartDumpArgs(unsigned, const char*) { return 0; }
API int aclopStopDumpArgs(unsigned) { return 0; }
API void* aclCreateGraphDumpOpt() { return malloc(1); }
API int aclDestroyGraphDumpOpt(void* option) { return free(option), 0; }

API int aclrtGetSysParamOpt(int name, int64_t* value) { return *value = parameters[name & 63], 0; }
API int aclrtSetSysParamOpt(int name, int64_t value) { return parameters[name & 63] = value, 0; }
API int aclrtCtxGetSysParamOpt(int name, int64_t* value) { return aclrtGetSysParamOpt(name, value); }
API int aclrtCtxSetSysParamOpt(int name, int64_t value) { return aclrtSetSysParamOpt(name, value); }
