//! Guest side: encodes arguments, and copies results to the program's memory.
//!
//! UNSAFETY: reads and writes through the pointers that the program passes, as the driver would.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CStr, c_char};

use cuda_ring::MAX_WORDS;

use crate::boxes::{ARRAY, BoxCopy, WORDS_2D, WORDS_3D};
use crate::describe::{Arg, Call, Kind, RESOURCE_WORDS, index_of};

/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: i32 = 1;
/// `CUDA_ERROR_INVALID_HANDLE`.
const INVALID_HANDLE: i32 = 400;
/// `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: i32 = 801;

/// Maximum total size of a call's results in words, which is also the size of a result area.
pub const MAX_RESULT_WORDS: usize = 8 << 10;

/// An encoded call.
#[derive(Clone, Copy, Debug, Default)]
pub struct Encoded {
    /// Handle of the new object, if the call creates one.
    pub new: Option<(Kind, u64)>,
    /// Total size of the results in words.
    pub result_words: usize,
}

/// Returns true if the handle is valid as an argument of this kind.
fn accepts(kind: Kind, handle: u64) -> bool {
    index_of(kind, handle).is_some() || (kind == Kind::Stream && handle <= 2)
}

fn words(bytes: usize) -> usize {
    bytes.div_ceil(8)
}

/// Returns the element count in the argument with this index.
fn count(args: &[u64], index: u8) -> Result<usize, i32> {
    let count = args.get(usize::from(index)).copied().unwrap_or_default() & 0xffff_ffff;
    if count > MAX_WORDS as u64 * 8 { Err(INVALID_VALUE) } else { Ok(count as usize) }
}

/// Appends bytes as words. The last word is padded with zeros.
///
/// # Safety
/// `from` must point to `bytes` readable bytes.
unsafe fn append(into: &mut Vec<u64>, from: u64, bytes: usize) {
    let mut rest = bytes;
    let mut at = from as *const u8;
    while rest > 0 {
        let mut word = [0u8; 8];
        let length = rest.min(8);
        // SAFETY: guaranteed by the caller.
        unsafe { std::ptr::copy_nonoverlapping(at, word.as_mut_ptr(), length) };
        into.push(u64::from_le_bytes(word));
        at = at.wrapping_add(length);
        rest -= length;
    }
}

/// Reads words from the program's memory.
///
/// # Safety
/// `from` must point to `into.len()` readable words.
unsafe fn read(from: u64, into: &mut [u64]) {
    // SAFETY: guaranteed by the caller. The source may be unaligned, so this copies bytes.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, into.as_mut_ptr().cast::<u8>(), 8 * into.len()) };
}

/// Appends the words of a copy after checking its array handles.
fn append_copy(into: &mut Vec<u64>, copy: BoxCopy, words: &[u64]) -> Result<(), i32> {
    if [copy.from, copy.to].iter().any(|end| end.kind == ARRAY && !accepts(Kind::Array, end.array)) {
        return Err(INVALID_HANDLE);
    }
    into.extend_from_slice(words);
    Ok(())
}

/// Returns true if an argument is a pointer that must not be null.
fn is_required(arg: Arg) -> bool {
    matches!(
        arg,
        Arg::Out(_)
            | Arg::OutPart(..)
            | Arg::In(_)
            | Arg::InAddressed(_)
            | Arg::InOut(_)
            | Arg::Text
            | Arg::Copy2d
            | Arg::Copy3d
            | Arg::Resource
            | Arg::NewNumber(_)
    )
}

/// Appends a call's arguments to `into`. `fresh` creates a handle for a new object.
///
/// # Errors
/// Returns the driver's error for an invalid argument.
///
/// # Safety
/// The arguments must be those of the function that `call` describes.
pub unsafe fn encode(
    call: &Call,
    args: &[u64],
    fresh: &mut dyn FnMut(Kind) -> u64,
    into: &mut Vec<u64>,
) -> Result<Encoded, i32> {
    let mut encoded = Encoded::default();
    for (index, arg) in call.args.iter().enumerate() {
        let value = args.get(index).copied().unwrap_or_default();
        match *arg {
            Arg::Word | Arg::Address | Arg::Range(_) | Arg::Image => into.push(value),
            Arg::Handle(kind) | Arg::Drop(kind) if !accepts(kind, value) => return Err(INVALID_HANDLE),
            Arg::Optional(kind) if value != 0 && !accepts(kind, value) => return Err(INVALID_HANDLE),
            Arg::Handle(_) | Arg::Drop(_) | Arg::Optional(_) => into.push(value),
            Arg::New(kind) => {
                if value == 0 {
                    return Err(INVALID_VALUE);
                }
                let handle = fresh(kind);
                encoded.new = Some((kind, handle));
                into.push(handle);
            }
            Arg::Null if value != 0 => return Err(NOT_SUPPORTED),
            Arg::Null | Arg::ImageBytes => {}
            _ if value == 0 && is_required(*arg) => return Err(INVALID_VALUE),
            Arg::NewNumber(_) => encoded.result_words += 1,
            Arg::DropNumber(_) | Arg::PlainAttribute => into.push(value),
            Arg::Copy2d => {
                let mut words = [0; WORDS_2D];
                // SAFETY: guaranteed by the caller; the pointer is not null.
                unsafe { read(value, &mut words) };
                append_copy(into, BoxCopy::from_2d(&words), &BoxCopy::from_2d(&words).to_2d())?;
            }
            Arg::Copy3d => {
                let mut words = [0; WORDS_3D];
                // SAFETY: as above.
                unsafe { read(value, &mut words) };
                append_copy(into, BoxCopy::from_3d(&words), &BoxCopy::from_3d(&words).to_3d())?;
            }
            Arg::Resource => {
                let mut words = [0; RESOURCE_WORDS];
                // SAFETY: as above.
                unsafe { read(value, &mut words) };
                let [kind, object, ..] = words;
                let is_known = match kind & 0xffff_ffff {
                    0 => accepts(Kind::Array, object),
                    1 => accepts(Kind::Mipmap, object),
                    _ => true,
                };
                if !is_known {
                    return Err(INVALID_HANDLE);
                }
                into.extend(words);
            }
            Arg::Out(bytes) => encoded.result_words += words(usize::from(bytes)),
            Arg::OutPart(_, bytes) => encoded.result_words += words(usize::from(bytes)),
            Arg::OutOptional(bytes) => {
                into.push(u64::from(value != 0));
                encoded.result_words += if value == 0 { 0 } else { words(usize::from(bytes)) };
            }
            Arg::OutBytes(of) => {
                let room = count(args, of)?;
                if value == 0 || words(room) > MAX_RESULT_WORDS {
                    return Err(INVALID_VALUE);
                }
                into.push(room as u64);
                encoded.result_words += words(room);
            }
            // SAFETY: guaranteed by the caller; the pointer is not null.
            Arg::In(bytes) | Arg::InAddressed(bytes) => unsafe { append(into, value, usize::from(bytes)) },
            Arg::InOptional(bytes) => {
                into.push(u64::from(value != 0));
                if value != 0 {
                    // SAFETY: as above.
                    unsafe { append(into, value, usize::from(bytes)) };
                }
            }
            Arg::InOut(bytes) => {
                // SAFETY: as above.
                unsafe { append(into, value, usize::from(bytes)) };
                encoded.result_words += words(usize::from(bytes));
            }
            Arg::Text => {
                // SAFETY: as above; the string is NUL-terminated.
                let text = unsafe { CStr::from_ptr(value as *const c_char) }.to_bytes();
                if text.len() > MAX_WORDS * 4 {
                    return Err(INVALID_VALUE);
                }
                into.push(text.len() as u64);
                // SAFETY: `text` refers to this memory.
                unsafe { append(into, value, text.len()) };
            }
            Arg::Array(bytes, of) | Arg::ArrayButOne(bytes, of) => {
                let elements = count(args, of)?;
                into.push(elements as u64);
                let fewer = usize::from(matches!(*arg, Arg::ArrayButOne(..)));
                let bytes = elements.saturating_sub(fewer) * usize::from(bytes);
                if value == 0 && bytes > 0 || bytes > MAX_WORDS * 4 {
                    return Err(INVALID_VALUE);
                }
                // SAFETY: guaranteed by the caller.
                unsafe { append(into, value, bytes) };
            }
            Arg::Handles(kind, of) => {
                let elements = count(args, of)?;
                if value == 0 && elements > 0 || elements > MAX_WORDS / 2 {
                    return Err(INVALID_VALUE);
                }
                into.push(elements as u64);
                let first = into.len();
                // SAFETY: guaranteed by the caller.
                unsafe { append(into, value, elements * 8) };
                if !into.iter().skip(first).all(|handle| accepts(kind, *handle)) {
                    return Err(INVALID_HANDLE);
                }
            }
        }
        if into.len() > MAX_WORDS {
            return Err(INVALID_VALUE);
        }
    }
    Ok(encoded)
}

/// Copies a successful call's results from the reply to the program's memory.
///
/// # Safety
/// Same as for [`encode`], with the same arguments.
pub unsafe fn unpack(call: &Call, args: &[u64], results: &[u64]) {
    let mut from = results.iter();
    for (index, arg) in call.args.iter().enumerate() {
        let value = args.get(index).copied().unwrap_or_default();
        let (bytes, zeros) = match *arg {
            Arg::Out(bytes) | Arg::InOut(bytes) => (usize::from(bytes), 0),
            Arg::OutPart(all, bytes) => (usize::from(bytes), usize::from(all.saturating_sub(bytes))),
            Arg::NewNumber(_) => (8, 0),
            Arg::OutOptional(bytes) if value != 0 => (usize::from(bytes), 0),
            Arg::OutBytes(of) => (count(args, of).unwrap_or_default(), 0),
            _ => continue,
        };
        let mut at = value as *mut u8;
        let mut rest = bytes;
        while rest > 0 {
            let word = from.next().copied().unwrap_or_default().to_le_bytes();
            let length = rest.min(8);
            // SAFETY: guaranteed by the caller: the program's memory has space for the result.
            unsafe { std::ptr::copy_nonoverlapping(word.as_ptr(), at, length) };
            at = at.wrapping_add(length);
            rest -= length;
        }
        // SAFETY: as above.
        unsafe { std::ptr::write_bytes(at, 0, zeros) };
    }
}
