//! Submissions of a program with several cards. Each submission passes the gate of the card that it runs on.

use std::ffi::c_int;

use super::{UNGATED_TOKEN, enter_on, leave_on};
use crate::events;
use crate::shim::{Card, Shim};
use crate::streams::{self, stream};
use crate::symbols::{Arguments, COPIES, COUNT, at};

/// Bit position of the card's number in a token.
const CARD: u32 = 32;
/// Mask of the card's number, after shifting.
const CARD_MASK: u64 = 0xffff;
/// Set in a token if the stream's context may not be current.
const HAS_CONTEXT: u64 = 1 << 48;

/// Addresses that a submission accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Addresses {
    /// The address in the argument with this index.
    One(u8),
    /// The addresses in the first two arguments.
    Two,
    /// Addresses that are not arguments.
    Any,
    /// No address on another card: kernels need peer access for that, and graph nodes are checked at creation.
    None,
}

static ADDRESSES: [Addresses; COUNT] = addresses();

const fn addresses() -> [Addresses; COUNT] {
    let mut all = [Addresses::None; COUNT];
    let mut index = 0;
    while index < COUNT {
        if COPIES[index] {
            all[index] = Addresses::Any;
        }
        index += 1;
    }
    let mut group = 0;
    while group < KNOWN.len() {
        let (addresses, functions) = KNOWN[group];
        let mut n = 0;
        while n < functions.len() {
            all[functions[n]] = addresses;
            n += 1;
        }
        group += 1;
    }
    all
}

const KNOWN: [(Addresses, &[usize]); 4] = [
    (
        Addresses::Two,
        &[
            at::cuMemcpy,
            at::cuMemcpy_ptds,
            at::cuMemcpyAsync,
            at::cuMemcpyAsync_ptsz,
            at::cuMemcpyDtoD_v2,
            at::cuMemcpyDtoD_v2_ptds,
            at::cuMemcpyDtoDAsync_v2,
            at::cuMemcpyDtoDAsync_v2_ptsz,
        ],
    ),
    (
        Addresses::One(0),
        &[
            at::cuMemcpyHtoD_v2,
            at::cuMemcpyHtoD_v2_ptds,
            at::cuMemcpyHtoDAsync_v2,
            at::cuMemcpyHtoDAsync_v2_ptsz,
            at::cuMemsetD8_v2,
            at::cuMemsetD8_v2_ptds,
            at::cuMemsetD8Async,
            at::cuMemsetD8Async_ptsz,
            at::cuMemsetD16_v2,
            at::cuMemsetD16_v2_ptds,
            at::cuMemsetD16Async,
            at::cuMemsetD16Async_ptsz,
            at::cuMemsetD32_v2,
            at::cuMemsetD32_v2_ptds,
            at::cuMemsetD32Async,
            at::cuMemsetD32Async_ptsz,
        ],
    ),
    (
        Addresses::One(1),
        &[
            at::cuMemcpyDtoH_v2,
            at::cuMemcpyDtoH_v2_ptds,
            at::cuMemcpyDtoHAsync_v2,
            at::cuMemcpyDtoHAsync_v2_ptsz,
            at::cuStreamWaitValue32_v2,
            at::cuStreamWaitValue32_v2_ptsz,
            at::cuStreamWaitValue64_v2,
            at::cuStreamWaitValue64_v2_ptsz,
            at::cuStreamWriteValue32_v2,
            at::cuStreamWriteValue32_v2_ptsz,
            at::cuStreamWriteValue64_v2,
            at::cuStreamWriteValue64_v2_ptsz,
        ],
    ),
    (
        Addresses::Any,
        &[
            at::cuStreamBatchMemOp,
            at::cuStreamBatchMemOp_ptsz,
            at::cuStreamBatchMemOp_v2,
            at::cuStreamBatchMemOp_v2_ptsz,
            at::cuStreamWaitValue32,
            at::cuStreamWaitValue32_ptsz,
            at::cuStreamWaitValue64,
            at::cuStreamWaitValue64_ptsz,
            at::cuStreamWriteValue32,
            at::cuStreamWriteValue32_ptsz,
            at::cuStreamWriteValue64,
            at::cuStreamWriteValue64_ptsz,
        ],
    ),
];

/// Returns true if a submission on `card` may access another card's memory without peer access.
fn crosses(shim: &Shim, card: &Card, index: usize, arguments: Arguments) -> bool {
    let is_elsewhere = |n: u8| shim.is_on_other_card(card, argument(arguments, n));
    match ADDRESSES.get(index).copied().unwrap_or(Addresses::Any) {
        Addresses::None => false,
        Addresses::One(n) => is_elsewhere(n),
        Addresses::Two => is_elsewhere(0) || is_elsewhere(1),
        Addresses::Any => true,
    }
}

/// Returns an argument by its position in the declaration.
///
/// UNSAFETY: reads a call argument.
#[allow(unsafe_code, reason = "see UNSAFETY")]
fn argument(arguments: Arguments, n: u8) -> u64 {
    // SAFETY: each function in `KNOWN` has this argument.
    unsafe { arguments.get(usize::from(n)) }
}

/// Returns the card that a submission runs on, and the context of its stream if this context may not be current.
fn place(shim: &Shim, index: usize, arguments: Arguments) -> (&Card, Option<u64>) {
    if streams::is_known(index) { shim.place_of_stream(stream(index, arguments)) } else { (shim.current(), None) }
}

/// Runs `work` with a stream's context current, because events that measure the stream's work must belong to this
/// context.
fn within<T>(context: Option<u64>, work: impl FnOnce() -> T) -> T {
    match context {
        Some(context) => events::within(context, work),
        None => work(),
    }
}

/// Prepares a submission.
#[inline(never)]
pub fn enter(shim: &Shim, index: usize, arguments: Arguments) -> u64 {
    let (card, context) = place(shim, index, arguments);
    // A captured graph may have nodes on several cards, but passes only one card's gate when launched.
    if !shim.cross.is_ready() && (shim.captures.any() || crosses(shim, card, index, arguments)) {
        shim.allow_cross_access();
    }
    match within(context, || enter_on(shim, card, index, arguments)) {
        UNGATED_TOKEN => UNGATED_TOKEN,
        stripe => stripe | (card.number as u64) << CARD | if context.is_some() { HAS_CONTEXT } else { 0 },
    }
}

/// Completes a submission.
#[inline(never)]
pub fn leave(shim: &Shim, index: usize, arguments: Arguments, token: u64, result: c_int) {
    let card = shim.card((token >> CARD & CARD_MASK) as usize);
    // Repeat the lookup only if the stream's context may not be current, which is rare.
    let context = if token & HAS_CONTEXT == 0 { None } else { place(shim, index, arguments).1 };
    within(context, || leave_on(shim, card, index, arguments, token & u64::from(u32::MAX), result));
}
