//! The subset of the CUDA driver API that Gdev supports, implemented with the `gdev` crate: contexts, memory, copies,
//! modules, launches, streams, events, and shared segments (`cuShmGet`, `cuShmAt`, `cuShmDt`, `cuShmCtl`).
//!
//! A driver API program uses this library as its `libcuda.so.1`, either in a guest with stock nouveau or on the host
//! with a vGPU. Devices are the nouveau render nodes, unless the environment variable `GDEV_TARGET` names another
//! device. Modules are sm_20 cubins, or assembly for the `sm20` crate.
//!
//! A context executes all of its work in order. Streams therefore have no effect on the order, and an event marks all
//! earlier work of its context. An event with timing waits for that work when it is recorded.
//!
//! Calls on one context, including waits, are serialized, so use a separate context for each thread. The code of an
//! unloaded module remains in card memory until its context is destroyed.
//!
//! Handles are numbers that this library looks up, so an invalid or stale handle causes an error. Parts: `error`
//! (results), `device`, `context`, `memory`, `module`, `order` (streams and events), `segment`.
//!
//! Not supported: the runtime API, textures, arrays, graphs, PTX, and everything added after CUDA 4.
//!
//! UNSAFETY: reads and writes memory through pointers from the program, as declared in NVIDIA's `cuda.h`.

#![expect(unsafe_code, reason = "see UNSAFETY")]
#![expect(clippy::missing_safety_doc, reason = "the crate documentation states the conditions of all functions")]

mod context;
mod device;
mod error;
mod memory;
mod module;
mod order;
mod segment;

pub use context::{
    cuCtxCreate, cuCtxCreate_v2, cuCtxDestroy, cuCtxDestroy_v2, cuCtxGetApiVersion, cuCtxGetCurrent, cuCtxGetDevice,
    cuCtxPopCurrent, cuCtxPopCurrent_v2, cuCtxPushCurrent, cuCtxPushCurrent_v2, cuCtxSetCurrent, cuCtxSynchronize,
};
pub use device::{
    cuDeviceComputeCapability, cuDeviceGet, cuDeviceGetAttribute, cuDeviceGetCount, cuDeviceGetName, cuDeviceTotalMem,
    cuDeviceTotalMem_v2, cuDriverGetVersion, cuInit,
};
pub use error::{cuGetErrorName, cuGetErrorString};
pub use memory::{
    cuMemAlloc, cuMemAlloc_v2, cuMemAllocHost, cuMemAllocHost_v2, cuMemFree, cuMemFree_v2, cuMemFreeHost,
    cuMemGetAddressRange, cuMemGetAddressRange_v2, cuMemGetInfo, cuMemGetInfo_v2, cuMemHostAlloc, cuMemcpyDtoD,
    cuMemcpyDtoD_v2, cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, cuMemcpyDtoH, cuMemcpyDtoH_v2, cuMemcpyDtoHAsync,
    cuMemcpyDtoHAsync_v2, cuMemcpyHtoD, cuMemcpyHtoD_v2, cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, cuMemsetD8,
    cuMemsetD8_v2, cuMemsetD32, cuMemsetD32_v2,
};
pub use module::{
    cuFuncGetAttribute, cuFuncSetBlockShape, cuFuncSetSharedSize, cuLaunch, cuLaunchGrid, cuLaunchGridAsync,
    cuLaunchKernel, cuModuleGetFunction, cuModuleGetGlobal, cuModuleGetGlobal_v2, cuModuleLoad, cuModuleLoadData,
    cuModuleUnload, cuParamSetSize, cuParamSetf, cuParamSeti, cuParamSetv,
};
pub use order::{
    cuEventCreate, cuEventDestroy, cuEventDestroy_v2, cuEventElapsedTime, cuEventQuery, cuEventRecord,
    cuEventSynchronize, cuStreamCreate, cuStreamDestroy, cuStreamDestroy_v2, cuStreamQuery, cuStreamSynchronize,
    cuStreamWaitEvent,
};
pub use segment::{cuShmAt, cuShmCtl, cuShmDt, cuShmGet};
