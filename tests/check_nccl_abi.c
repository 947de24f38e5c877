/*
  check_nccl_abi.c: compares what examples/expert_parallel declares of NCCL with NCCL's own header: numbers and layouts in C,
  and in C++ the signature of every function as well. Needs nccl.h and the CUDA headers that it includes, and neither a library
  nor a GPU: compiling it is the check.

      cc  -std=c99 -I. -isystem $CUDA_HOME/include -fsyntax-only tests/check_nccl_abi.c
      c++ -std=c++17 -I. -isystem $CUDA_HOME/include -fsyntax-only -x c++ tests/check_nccl_abi.c
*/
#include <nccl.h>

#include "../examples/expert_parallel/nccl_api.h"

#define JOIN_AGAIN(a, b) a##b
#define JOIN(a, b) JOIN_AGAIN(a, b)
#define CHECK(condition) typedef char JOIN(check_on_line_, __LINE__)[(condition) ? 1 : -1]
#define CHECK_FIELD(theirs, ours) CHECK(offsetof(ncclConfig_t, theirs) == offsetof(nccl_config, ours) && sizeof(((ncclConfig_t *)0)->theirs) == sizeof(((nccl_config *)0)->ours))

CHECK((int)ncclSuccess == NCCL_SUCCESS);
CHECK((int)ncclInProgress == NCCL_IN_PROGRESS);
CHECK((int)ncclUint8 == NCCL_UINT8);
CHECK(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int));
CHECK(sizeof(ncclUniqueId) == sizeof(nccl_unique_id));
CHECK_FIELD(size, size);
CHECK_FIELD(magic, magic);
CHECK_FIELD(version, version);
CHECK_FIELD(blocking, blocking);
CHECK_FIELD(cgaClusterSize, cga_cluster_size);
CHECK(NCCL_CONFIG_UNDEF_INT == NCCL_UNDEFINED);
CHECK(NCCL_VERSION(2, 14, 0) == NCCL_CONFIG_VERSION);
CHECK(sizeof(nccl_config) <= sizeof(ncclConfig_t));

#ifdef __cplusplus
#include <type_traits>
/* Our types in their places: enumerations as int, the stream and the communicator as our pointers. */
template <class T> struct ours { typedef T type; };
template <> struct ours<ncclResult_t> { typedef int type; };
template <> struct ours<ncclDataType_t> { typedef int type; };
template <> struct ours<ncclResult_t *> { typedef int *type; };
template <> struct ours<ncclComm_t> { typedef nccl_comm type; };
template <> struct ours<ncclComm_t *> { typedef nccl_comm *type; };
template <> struct ours<cudaStream_t> { typedef gpu_stream type; };
template <> struct ours<ncclUniqueId> { typedef nccl_unique_id type; };
template <> struct ours<ncclUniqueId *> { typedef nccl_unique_id *type; };
template <> struct ours<ncclConfig_t *> { typedef nccl_config *type; };
template <class R, class... A> struct ours<R (*)(A...)> { typedef typename ours<R>::type (*type)(typename ours<A>::type...); };
#define CHECK_FUNCTION(name) static_assert(std::is_same<ours<decltype(&name)>::type, decltype(nccl_api::name)>::value, #name)
CHECK_FUNCTION(ncclGetVersion);
CHECK_FUNCTION(ncclGetUniqueId);
CHECK_FUNCTION(ncclCommInitRankConfig);
CHECK_FUNCTION(ncclCommFinalize);
CHECK_FUNCTION(ncclCommDestroy);
CHECK_FUNCTION(ncclCommAbort);
CHECK_FUNCTION(ncclCommGetAsyncError);
CHECK_FUNCTION(ncclGroupStart);
CHECK_FUNCTION(ncclGroupEnd);
CHECK_FUNCTION(ncclSend);
CHECK_FUNCTION(ncclRecv);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
CHECK_FUNCTION(ncclAlltoAll);
#endif
CHECK_FUNCTION(ncclGetErrorString);
CHECK_FUNCTION(ncclGetLastError);
#endif

int main(void) { return 0; }
