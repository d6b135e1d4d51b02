//! Determines the stream of a submission.
//!
//! UNSAFETY: reads call arguments by position.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::calls::{self, Object, SUCCESS};
use crate::symbols::{Arguments, COUNT, PER_THREAD, at};

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD_HANDLE: u64 = 2;
/// `CU_STREAM_LEGACY`.
const LEGACY: u64 = 1;

/// A stream, independent of how a call refers to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream {
    /// Handle of the stream, or 0 for the default stream shared by all threads.
    pub handle: u64,
    /// For a per-thread default stream, the number assigned to the thread by this module. Otherwise, 0.
    thread: u32,
}

#[inline]
fn thread() -> u32 {
    thread_local! {
        static THREAD_NUMBER: Cell<u32> = const { Cell::new(0) };
    }
    /// Number of the next thread. Static, because thread numbers must be unique in the process.
    static NEXT: AtomicU32 = AtomicU32::new(1);
    THREAD_NUMBER
        .try_with(|mine| {
            if mine.get() == 0 {
                mine.set(NEXT.fetch_add(1, Ordering::Relaxed));
            }
            mine.get()
        })
        // The thread is exiting, so its number is no longer available.
        .unwrap_or(u32::MAX)
}

impl Stream {
    /// Returns the stream with this handle, which the program created.
    pub const fn made(handle: u64) -> Self {
        Self { handle, thread: 0 }
    }

    /// Returns the stream that `handle` refers to in this thread. A null handle refers to the thread's own stream if
    /// `per_thread` is true, and otherwise to the context's default stream.
    #[inline]
    pub fn named(handle: u64, per_thread: bool) -> Self {
        match handle {
            PER_THREAD_HANDLE => Self { handle: PER_THREAD_HANDLE, thread: thread() },
            0 if per_thread => Self { handle: PER_THREAD_HANDLE, thread: thread() },
            0 | LEGACY => Self { handle: 0, thread: 0 },
            _ => Self::made(handle),
        }
    }

    /// Returns true if only one thread can refer to the stream.
    pub fn is_threads_own(self) -> bool {
        self.thread != 0
    }

    /// Returns true for default streams.
    #[inline]
    pub fn is_default(self) -> bool {
        self.handle <= PER_THREAD_HANDLE
    }

    /// Returns true if this thread can refer to the stream. A thread cannot query another thread's per-thread stream,
    /// or record events in that stream.
    #[inline]
    pub fn is_in_reach(self) -> bool {
        self.thread == 0 || self.thread == thread()
    }

    /// Returns the stream's handle for the driver. This thread must be able to refer to the stream.
    pub fn object(self) -> Object {
        self.handle as Object
    }

    /// Returns true if the stream is being captured, or if the query is not permitted because another stream is being
    /// captured.
    pub fn is_capturing(self) -> bool {
        let mut status: c_int = 0;
        // SAFETY: the program submits work to this stream.
        let result = unsafe { calls::stream_is_capturing(self.object(), &raw mut status) };
        // An error means that the query would disturb a capture.
        result != SUCCESS || status != 0
    }
}

/// The call has no stream argument, so it uses the default stream.
const DEFAULT: u8 = u8::MAX;
/// The stream is in the `CUlaunchConfig` argument.
const CONFIG: u8 = u8::MAX - 1;
/// The call uses several streams or an unknown stream.
const UNKNOWN: u8 = u8::MAX - 2;

/// Zero-based index of each function's stream argument, or one of the constants above.
static PLACES: [u8; COUNT] = places();

const fn places() -> [u8; COUNT] {
    let mut places = [DEFAULT; COUNT];
    let mut group = 0;
    while group < ALL.len() {
        let (place, functions) = ALL[group];
        let mut n = 0;
        while n < functions.len() {
            places[functions[n]] = place;
            n += 1;
        }
        group += 1;
    }
    places
}

const ALL: [(u8, &[usize]); 11] = [
    (
        0,
        &[
            at::cuLaunchHostFunc,
            at::cuLaunchHostFunc_ptsz,
            at::cuLaunchHostFunc_v2,
            at::cuLaunchHostFunc_v2_ptsz,
            at::cuStreamAddCallback,
            at::cuStreamAddCallback_ptsz,
            at::cuStreamAttachMemAsync,
            at::cuStreamAttachMemAsync_ptsz,
            at::cuStreamBatchMemOp,
            at::cuStreamBatchMemOp_ptsz,
            at::cuStreamBatchMemOp_v2,
            at::cuStreamBatchMemOp_v2_ptsz,
            at::cuStreamWaitValue32,
            at::cuStreamWaitValue32_ptsz,
            at::cuStreamWaitValue32_v2,
            at::cuStreamWaitValue32_v2_ptsz,
            at::cuStreamWaitValue64,
            at::cuStreamWaitValue64_ptsz,
            at::cuStreamWaitValue64_v2,
            at::cuStreamWaitValue64_v2_ptsz,
            at::cuStreamWriteValue32,
            at::cuStreamWriteValue32_ptsz,
            at::cuStreamWriteValue32_v2,
            at::cuStreamWriteValue32_v2_ptsz,
            at::cuStreamWriteValue64,
            at::cuStreamWriteValue64_ptsz,
            at::cuStreamWriteValue64_v2,
            at::cuStreamWriteValue64_v2_ptsz,
        ],
    ),
    (
        1,
        &[
            at::cuGraphLaunch,
            at::cuGraphLaunch_ptsz,
            at::cuGraphUpload,
            at::cuGraphUpload_ptsz,
            at::cuMemcpy2DAsync,
            at::cuMemcpy2DAsync_v2,
            at::cuMemcpy2DAsync_v2_ptsz,
            at::cuMemcpy3DAsync,
            at::cuMemcpy3DAsync_v2,
            at::cuMemcpy3DAsync_v2_ptsz,
            at::cuMemcpy3DPeerAsync,
            at::cuMemcpy3DPeerAsync_ptsz,
        ],
    ),
    (2, &[at::cuMemcpy3DWithAttributesAsync, at::cuMemcpy3DWithAttributesAsync_ptsz]),
    (
        3,
        &[
            at::cuFabricCpyBatchAsync,
            at::cuFabricCpyBatchAsync_ptsz,
            at::cuLaunchGridAsync,
            at::cuMemPrefetchAsync,
            at::cuMemPrefetchAsync_ptsz,
            at::cuMemcpy3DBatchAsync_v2,
            at::cuMemcpy3DBatchAsync_v2_ptsz,
            at::cuMemcpyAsync,
            at::cuMemcpyAsync_ptsz,
            at::cuMemcpyDtoDAsync,
            at::cuMemcpyDtoDAsync_v2,
            at::cuMemcpyDtoDAsync_v2_ptsz,
            at::cuMemcpyDtoHAsync,
            at::cuMemcpyDtoHAsync_v2,
            at::cuMemcpyDtoHAsync_v2_ptsz,
            at::cuMemcpyHtoDAsync,
            at::cuMemcpyHtoDAsync_v2,
            at::cuMemcpyHtoDAsync_v2_ptsz,
            at::cuMemsetD16Async,
            at::cuMemsetD16Async_ptsz,
            at::cuMemsetD32Async,
            at::cuMemsetD32Async_ptsz,
            at::cuMemsetD8Async,
            at::cuMemsetD8Async_ptsz,
        ],
    ),
    (
        4,
        &[
            at::cuMemBatchDecompressAsync,
            at::cuMemBatchDecompressAsync_ptsz,
            at::cuMemDiscardBatchAsync,
            at::cuMemDiscardBatchAsync_ptsz,
            // The 8-byte location is passed as one argument.
            at::cuMemPrefetchAsync_v2,
            at::cuMemPrefetchAsync_v2_ptsz,
            at::cuMemcpy3DBatchAsync,
            at::cuMemcpy3DBatchAsync_ptsz,
            at::cuMemcpyAtoHAsync,
            at::cuMemcpyAtoHAsync_v2,
            at::cuMemcpyAtoHAsync_v2_ptsz,
            at::cuMemcpyHtoAAsync,
            at::cuMemcpyHtoAAsync_v2,
            at::cuMemcpyHtoAAsync_v2_ptsz,
            at::cuMemcpyWithAttributesAsync,
            at::cuMemcpyWithAttributesAsync_ptsz,
        ],
    ),
    (
        5,
        &[
            at::cuMemcpyPeerAsync,
            at::cuMemcpyPeerAsync_ptsz,
            at::cuMemsetD2D16Async,
            at::cuMemsetD2D16Async_ptsz,
            at::cuMemsetD2D32Async,
            at::cuMemsetD2D32Async_ptsz,
            at::cuMemsetD2D8Async,
            at::cuMemsetD2D8Async_ptsz,
        ],
    ),
    (
        7,
        &[
            at::cuMemDiscardAndPrefetchBatchAsync,
            at::cuMemDiscardAndPrefetchBatchAsync_ptsz,
            at::cuMemPrefetchBatchAsync,
            at::cuMemPrefetchBatchAsync_ptsz,
            at::cuMemcpyBatchAsync_v2,
            at::cuMemcpyBatchAsync_v2_ptsz,
        ],
    ),
    (
        8,
        &[
            at::cuLaunchCooperativeKernel,
            at::cuLaunchCooperativeKernel_ptsz,
            at::cuLaunchKernel,
            at::cuLaunchKernel_ptsz,
            at::cuMemcpyBatchAsync,
            at::cuMemcpyBatchAsync_ptsz,
        ],
    ),
    (CONFIG, &[at::cuLaunchKernelEx, at::cuLaunchKernelEx_ptsz]),
    (UNKNOWN, &[at::cuLaunchCooperativeKernelMultiDevice]),
    // These calls submit to the default stream.
    (DEFAULT, &[at::cuLaunch, at::cuLaunchGrid]),
];

/// Returns the stream that a call submits to. Synchronous calls use the default stream. If a call uses several streams,
/// the result is meaningless (see [`is_known`]).
#[inline]
pub fn stream(index: usize, arguments: Arguments) -> Stream {
    let per_thread = PER_THREAD.get(index).copied().unwrap_or(false);
    let handle = match PLACES.get(index).copied().unwrap_or(DEFAULT) {
        DEFAULT | UNKNOWN => 0,
        CONFIG => {
            // SAFETY: the first argument is the configuration. It consists of seven 32-bit numbers, padding, and the
            // stream.
            unsafe {
                let config = arguments.get(0) as *const u64;
                if config.is_null() { 0 } else { *config.add(4) }
            }
        }
        // SAFETY: the positions match the declarations in the headers.
        place => unsafe { arguments.get(usize::from(place)) },
    };
    Stream::named(handle, per_thread)
}

/// Returns true if [`stream`] can determine the stream of a call.
#[inline]
pub fn is_known(index: usize) -> bool {
    PLACES.get(index) != Some(&UNKNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_own_stream_is_out_of_others_reach() {
        let mine = Stream::named(0, true);
        assert_eq!(mine, Stream::named(PER_THREAD_HANDLE, false), "by either name");
        assert!(mine.is_threads_own() && mine.is_in_reach());
        let other = std::thread::spawn(|| Stream::named(PER_THREAD_HANDLE, true)).join().expect("named");
        assert!(other != mine && !other.is_in_reach());
        assert_eq!(Stream::named(0, false), Stream::named(LEGACY, true));
        assert!(Stream::named(77, true) == Stream::named(77, false) && Stream::named(77, true).is_in_reach());
    }

    #[test]
    fn every_function_with_a_stream_has_its_place() {
        let lacks = |(index, name): &(usize, &&std::ffi::CStr)| {
            let name = name.to_string_lossy();
            let copies = name.starts_with("cuMemcpy") || name.starts_with("cuMemset");
            let takes_none = copies && !name.contains("Async") || ["cuLaunch", "cuLaunchGrid"].contains(&&*name);
            crate::symbols::GATED[*index] && !takes_none && PLACES[*index] == DEFAULT
        };
        let lacking: Vec<_> = crate::symbols::NAMES.iter().enumerate().take(COUNT).filter(lacks).collect();
        assert!(lacking.is_empty(), "{lacking:?}");
    }
}
