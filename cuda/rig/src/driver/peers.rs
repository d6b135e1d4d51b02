//! Driver calls of programs that use several cards.
//!
//! UNSAFETY: calls library functions with the signatures from NVIDIA's headers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use super::{Cuda, Failed, check};

impl Cuda {
    /// Makes the primary context of another device current, and returns the driver with this context.
    pub fn on(&self, device: i32) -> Result<Self, Failed> {
        let mut context = 0;
        self.raw_retain(&raw mut context, device)?;
        let cuda = Self { context, ..*self };
        cuda.enter()?;
        Ok(cuda)
    }

    /// Returns true if both values refer to the same context.
    pub fn is_same(&self, other: Cuda) -> bool {
        self.context == other.context
    }

    /// Creates another context on a device and makes it current.
    pub fn another_on(&self, device: i32) -> Result<Self, Failed> {
        let mut context = 0;
        self.raw_context(&raw mut context, 0, device)?;
        Ok(Self { context, ..*self })
    }

    /// Destroys the context.
    pub fn end_context(self) -> Result<(), Failed> {
        let call = function!(self, c"cuCtxDestroy", 4000, fn(u64));
        // SAFETY: the context belongs to this program.
        check("cuCtxDestroy", unsafe { call(self.context) })
    }

    /// Returns a device's memory size in bytes.
    pub fn total_of(&self, device: i32) -> Result<u64, Failed> {
        let mut bytes = 0;
        self.raw_total(&raw mut bytes, device).map(|()| bytes as u64)
    }

    /// Returns 1 if a device can access another device's memory, or 0 otherwise.
    pub fn can_access(&self, device: i32, peer: i32) -> Result<i32, Failed> {
        let call = function!(self, c"cuDeviceCanAccessPeer", 4000, fn(*mut c_int, c_int, c_int));
        let mut can = 0;
        // SAFETY: the pointer is valid.
        check("cuDeviceCanAccessPeer", unsafe { call(&raw mut can, device, peer) }).map(|()| can)
    }

    /// Allows this context to access another context's memory.
    pub fn enable(&self, peer: Cuda) -> Result<(), Failed> {
        let call = function!(self, c"cuCtxEnablePeerAccess", 4000, fn(u64, u32));
        self.enter()?;
        // SAFETY: the call takes no pointers.
        check("cuCtxEnablePeerAccess", unsafe { call(peer.context, 0) })
    }

    /// Disables this context's access to another context's memory.
    pub fn disable(&self, peer: Cuda) -> Result<(), Failed> {
        let call = function!(self, c"cuCtxDisablePeerAccess", 4000, fn(u64));
        self.enter()?;
        // SAFETY: the call takes no pointers.
        check("cuCtxDisablePeerAccess", unsafe { call(peer.context) })
    }

    /// Copies memory from this context to another one synchronously.
    pub fn copy_to(&self, peer: Cuda, to: u64, from: u64, bytes: u64) -> Result<(), Failed> {
        let call = function!(self, c"cuMemcpyPeer", 4000, fn(u64, u64, u64, u64, usize));
        // SAFETY: both addresses are in card memory.
        check("cuMemcpyPeer", unsafe { call(to, peer.context, from, self.context, bytes as usize) })
    }

    /// Copies memory from this context to another one in stream order.
    pub fn copy_to_async(&self, peer: Cuda, to: u64, from: u64, bytes: u64, stream: u64) -> Result<(), Failed> {
        let call = function!(self, c"cuMemcpyPeerAsync", 4000, fn(u64, u64, u64, u64, usize, u64));
        // SAFETY: both addresses are in card memory.
        check("cuMemcpyPeerAsync", unsafe { call(to, peer.context, from, self.context, bytes as usize, stream) })
    }

    /// Gives devices read and write access to an address range.
    pub fn allow_all(&self, at: u64, bytes: u64, devices: &[i32]) -> Result<(), Failed> {
        let list: Vec<[i32; 3]> = devices.iter().map(|device| [1, *device, 3]).collect();
        self.raw_access(at, bytes as usize, list.as_ptr(), list.len())
    }

    /// Returns a device's access flags for an address.
    pub fn access_of(&self, device: i32, at: u64) -> Result<u64, Failed> {
        let mut flags = 0;
        self.raw_may(&raw mut flags, &[1, device], at).map(|()| flags)
    }

    /// Launches kernels on several devices with one call, as old libraries do.
    pub fn launch_on_all(&self, count: u32) -> Result<(), Failed> {
        let call = function!(self, c"cuLaunchCooperativeKernelMultiDevice", 9000, fn(*const c_void, u32, u32));
        // SAFETY: the library rejects the call before it reads the list.
        check("cuLaunchCooperativeKernelMultiDevice", unsafe { call(std::ptr::null(), count, 0) })
    }

    /// Gives a device access to the current device's default pool.
    pub fn open_pool(&self, device: i32) -> Result<(), Failed> {
        let call = function!(self, c"cuMemPoolSetAccess", 11020, fn(u64, *const [i32; 3], usize));
        // SAFETY: the access description is a local variable.
        check("cuMemPoolSetAccess", unsafe { call(0x9001, &[1, device, 3], 1) })
    }
}
