//! Parameters and attributes of functions and kernels. Results are cached, except for a kernel's attributes on devices
//! other than the current one.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use cuda_calls::{Kind, index_of, own};

use crate::call::{code, index, invoke, to};
use crate::contexts::current_device;
use crate::frame::{Frame, Handler};
use crate::result::{INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY};
use crate::thread::Thread;
use crate::{cached, connection};

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuKernelGetFunction", kernel_function),
    ("cuKernelGetAttribute", kernel_attribute),
    ("cuKernelSetAttribute", set_kernel_attribute),
    ("cuFuncGetAttribute", function_attribute),
    ("cuFuncSetAttribute", set_function_attribute),
];

/// Number of cached attributes per function.
const ATTRIBUTES: usize = 24;
/// Number of records per page.
const PAGE: usize = 256;
/// Number of record pages.
const PAGES: usize = 4096;

/// Parameters of a function.
#[derive(Debug)]
pub struct Parameters {
    /// Offset and size of each parameter, in bytes.
    pub all: Vec<(u32, u32)>,
    /// Total size of the parameters in bytes.
    pub bytes: usize,
}

/// Cached properties of a function.
#[derive(Debug, Default)]
pub struct Record {
    parameters: OnceLock<Parameters>,
    /// Attributes on the device that was current during the query. Bit 32 is set if the value is known.
    attributes: [AtomicU64; ATTRIBUTES],
    /// Handle of the kernel's function, or 0 if unknown.
    function: AtomicU64,
}

/// Pages of records. Static, and records are never moved or freed, so readers do not need a lock.
static RECORDS: [AtomicPtr<Record>; PAGES] = [const { AtomicPtr::new(std::ptr::null_mut()) }; PAGES];

/// Returns the record of a function.
///
/// UNSAFETY: dereferences a pointer to a leaked page, which is always valid.
#[allow(unsafe_code, reason = "see UNSAFETY")]
pub fn record(function: u64) -> Result<&'static Record, i32> {
    let number = index_of(Kind::Function, function).ok_or(INVALID_HANDLE)? as usize;
    let place = RECORDS.get(number / PAGE).ok_or(OUT_OF_MEMORY)?;
    let mut page = place.load(Ordering::Acquire);
    if page.is_null() {
        let new: Box<[Record]> = (0..PAGE).map(|_| Record::default()).collect();
        let new = Box::leak(new).as_mut_ptr();
        // If another thread was faster, use its page and leak this one.
        page =
            place.compare_exchange(page, new, Ordering::AcqRel, Ordering::Acquire).map_or_else(|other| other, |_| new);
    }
    // SAFETY: the page has `PAGE` records and is never freed.
    Ok(unsafe { &*page.add(number % PAGE) })
}

impl Record {
    /// Returns the function's parameters.
    pub fn parameters(&self, thread: &Thread, function: u64) -> Result<&Parameters, i32> {
        if let Some(known) = self.parameters.get() {
            return Ok(known);
        }
        let connection = connection::get()?;
        let area = connection.area();
        let answer = connection.ask(thread, own::FUNCTION_INFO, Some(&area), |message| message.push(function))?;
        if answer.code != 0 {
            return Err(answer.code);
        }
        let mut words = vec![0; answer.words(connection).min(1 + own::MAX_PARAMETERS)];
        answer.read(connection, &mut words);
        let count = words.first().copied().unwrap_or_default() as usize;
        let all: Vec<(u32, u32)> =
            words.iter().skip(1).take(count).map(|word| (*word as u32, (*word >> 32) as u32)).collect();
        let bytes = all.iter().map(|(offset, size)| *offset as usize + *size as usize).max().unwrap_or(0);
        if bytes > own::MAX_PARAMETER_BYTES {
            return Err(INVALID_VALUE);
        }
        Ok(self.parameters.get_or_init(|| Parameters { all, bytes }))
    }

    fn known(&self, attribute: u32) -> Option<i32> {
        let value = self.attributes.get(attribute as usize)?.load(Ordering::Acquire);
        (value >> 32 != 0).then_some(value as i32)
    }

    fn keep(&self, attribute: u32, value: Option<i32>) {
        if let Some(place) = self.attributes.get(attribute as usize) {
            place.store(value.map_or(0, |value| 1 << 32 | u64::from(value.cast_unsigned())), Ordering::Release);
        }
    }
}

fn kernel_function(frame: &Frame) -> i32 {
    let kernel = frame.arg(1);
    if frame.arg(0) == 0 {
        return INVALID_VALUE;
    }
    let found = record(kernel).and_then(|record| {
        let known = record.function.load(Ordering::Acquire);
        if known != 0 {
            return Ok(known);
        }
        let mut made = 0u64;
        invoke(index!("cuKernelGetFunction+"), &[to(&mut made), kernel])?;
        record.function.store(made, Ordering::Release);
        Ok(made)
    });
    found.map_or_else(|error| error, |function| frame.put(0, function))
}

fn get(frame: &Frame, function: u64, call: impl FnOnce(u64) -> Result<(), i32>) -> i32 {
    let attribute = frame.int(1);
    let value = record(function).and_then(|record| {
        if let Some(known) = record.known(attribute) {
            return Ok(known);
        }
        let mut value = 0i32;
        call(to(&mut value))?;
        record.keep(attribute, Some(value));
        Ok(value)
    });
    value.map_or_else(|error| error, |value| frame.put(0, value))
}

fn kernel_attribute(frame: &Frame) -> i32 {
    let (attribute, kernel, device) = (frame.arg(1), frame.arg(2), frame.arg(3));
    let call = |place| invoke(index!("cuKernelGetAttribute+"), &[place, attribute, kernel, device]);
    if current_device().is_ok_and(|current| u64::from(current) != device & 0xffff_ffff) {
        // Only values for one device are cached.
        let mut value = 0i32;
        return call(to(&mut value)).map_or_else(|error| error, |()| frame.put(0, value));
    }
    get(frame, kernel, call)
}

fn function_attribute(frame: &Frame) -> i32 {
    let (attribute, function) = (frame.arg(1), frame.arg(2));
    get(frame, function, |place| invoke(index!("cuFuncGetAttribute+"), &[place, attribute, function]))
}

fn set(function: u64, attribute: u32, value: i32, call: impl FnOnce() -> Result<(), i32>) -> i32 {
    code(record(function).and_then(|record| {
        // Libraries set the same value before each launch, so skip redundant calls.
        if record.known(attribute) == Some(value) {
            return Ok(());
        }
        record.keep(attribute, None);
        call()?;
        cached::clear();
        record.keep(attribute, Some(value));
        Ok(())
    }))
}

fn set_kernel_attribute(frame: &Frame) -> i32 {
    let (attribute, value, kernel, device) = (frame.arg(0), frame.arg(1), frame.arg(2), frame.arg(3));
    set(kernel, attribute as u32, value as i32, || {
        invoke(index!("cuKernelSetAttribute+"), &[attribute, value & 0xffff_ffff, kernel, device])
    })
}

fn set_function_attribute(frame: &Frame) -> i32 {
    let (function, attribute, value) = (frame.arg(0), frame.arg(1), frame.arg(2));
    set(function, attribute as u32, value as i32, || {
        invoke(index!("cuFuncSetAttribute+"), &[function, attribute, value & 0xffff_ffff])
    })
}
