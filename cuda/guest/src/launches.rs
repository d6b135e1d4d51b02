//! Kernel launches.
//!
//! UNSAFETY: reads parameters and configurations through the program's pointers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use cuda_calls::own::{self, ATTRIBUTE_WORDS, MAX_ATTRIBUTES};

use crate::call::{code, resolve_stream};
use crate::frame::{Frame, Handler};
use crate::functions::{Parameters, record};
use crate::result::{INVALID_CONTEXT, INVALID_VALUE};
use crate::{connection, thread};

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuLaunchKernel", launch),
    ("cuLaunchCooperativeKernel", launch_cooperative),
    ("cuLaunchKernelEx", launch_with_config),
    ("cuOccupancyMaxActiveClusters", max_clusters),
];

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Config {
    dimensions: [u32; 6],
    shared: u32,
    stream: u64,
    attributes: *const [u64; ATTRIBUTE_WORDS],
    attribute_count: u32,
}

/// A launch as requested by the program.
pub struct Launch {
    /// Handle of the function.
    pub function: u64,
    dimensions: [u32; 6],
    shared: u32,
    stream: u64,
    cooperative: bool,
    /// Array with a pointer to each parameter, or null.
    parameters: *const *const u8,
    /// The `extra` list, or null.
    extra: *const u64,
    attributes: *const [u64; ATTRIBUTE_WORDS],
    attribute_count: usize,
}

impl Launch {
    /// Creates the launch of a graph node, which has no stream. The parameters may be in an array or an `extra` list,
    /// as for an ordinary launch.
    pub fn from_node(function: u64, dimensions: [u32; 6], shared: u32, parameters: u64, extra: u64) -> Self {
        Self {
            function,
            dimensions,
            shared,
            stream: 0,
            cooperative: false,
            parameters: parameters as *const *const u8,
            extra: extra as *const u64,
            attributes: std::ptr::null(),
            attribute_count: 0,
        }
    }
}

/// Appends a launch in a stream, with its parameters and attributes, to `message`.
///
/// # Safety
/// The launch must come from the program.
pub unsafe fn append_all(
    message: &mut Vec<u64>,
    launch: &Launch,
    stream: u64,
    parameters: &Parameters,
) -> Result<(), i32> {
    append_head(message, launch, stream, parameters.bytes.div_ceil(8) as u64);
    // SAFETY: guaranteed by the caller.
    unsafe {
        append(message, launch, parameters)?;
        append_attributes(message, launch);
    }
    Ok(())
}

/// Returns the address and size of the buffer in the `extra` list.
///
/// # Safety
/// `extra` must be a list in the format required by `cuLaunchKernel`.
unsafe fn buffer(extra: *const u64) -> Result<(u64, usize), i32> {
    let (mut at, mut found) = (extra, (0, 0));
    // The list has at most two entries and an end marker.
    for _ in 0..4 {
        // SAFETY: guaranteed by the caller.
        let (key, value) = unsafe { (at.read_unaligned(), at.add(1)) };
        match key {
            0 => return Ok(found),
            // SAFETY: as above.
            1 => found.0 = unsafe { value.read_unaligned() },
            // SAFETY: as above.
            2 => found.1 = unsafe { (value.read_unaligned() as *const usize).read_unaligned() },
            _ => return Err(INVALID_VALUE),
        }
        at = at.wrapping_add(2);
    }
    Err(INVALID_VALUE)
}

/// Appends the bytes of a launch's parameters.
///
/// # Safety
/// The launch must come from the program.
unsafe fn append(message: &mut Vec<u64>, launch: &Launch, parameters: &Parameters) -> Result<(), i32> {
    let words = parameters.bytes.div_ceil(8);
    let first = message.len();
    message.resize(first + words, 0);
    let Some(room) = message.get_mut(first..) else { return Err(INVALID_VALUE) };
    let room = room.as_mut_ptr().cast::<u8>();
    if !launch.parameters.is_null() {
        for (index, (offset, size)) in parameters.all.iter().enumerate() {
            // SAFETY: the program passes a pointer to each parameter, and the buffer has space up to the end of the
            // last one.
            unsafe {
                let from = launch.parameters.add(index).read();
                std::ptr::copy_nonoverlapping(from, room.add(*offset as usize), *size as usize);
            }
        }
        return Ok(());
    }
    if launch.extra.is_null() {
        return if parameters.all.is_empty() { Ok(()) } else { Err(INVALID_VALUE) };
    }
    // SAFETY: guaranteed by the caller.
    let (from, bytes) = unsafe { buffer(launch.extra)? };
    let bytes = bytes.min(parameters.bytes);
    // SAFETY: the buffer and the destination both have this size.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, room, bytes) };
    Ok(())
}

fn send(launch: &Launch, per_thread: bool) -> Result<(), i32> {
    let connection = connection::get()?;
    let stream = resolve_stream(launch.stream, per_thread)?;
    let record = record(launch.function)?;
    let [_, _, _, bx, by, bz] = launch.dimensions.map(u64::from);
    // Return the errors that programs expect from the launch itself. Other errors are returned by the thread's next
    // call.
    if launch.dimensions.contains(&0) || bx * by * bz > 1024 || launch.attribute_count > MAX_ATTRIBUTES {
        return Err(INVALID_VALUE);
    }
    thread::with(|thread| {
        if thread.current.get() == 0 {
            return Err(INVALID_CONTEXT);
        }
        let parameters = record.parameters(thread, launch.function)?;
        connection.post(thread, own::LAUNCH, |message| {
            // SAFETY: the launch comes from the program.
            unsafe { append_all(message, launch, stream, parameters) }
        })
    })
}

fn plain(frame: &Frame, cooperative: bool) -> Launch {
    Launch {
        function: frame.arg(0),
        dimensions: [1, 2, 3, 4, 5, 6].map(|index| frame.int(index)),
        shared: frame.int(7),
        stream: frame.arg(8),
        cooperative,
        parameters: frame.arg(9) as *const *const u8,
        extra: if cooperative { std::ptr::null() } else { frame.arg(10) as *const u64 },
        attributes: std::ptr::null(),
        attribute_count: 0,
    }
}

fn launch(frame: &Frame) -> i32 {
    code(send(&plain(frame, false), frame.per_thread))
}

fn launch_cooperative(frame: &Frame) -> i32 {
    code(send(&plain(frame, true), frame.per_thread))
}

/// Reads a launch configuration.
fn configured(function: u64, config: u64, parameters: u64, extra: u64) -> Result<Launch, i32> {
    let config = config as *const Config;
    if config.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the program passes a valid configuration.
    let config = unsafe { config.read() };
    Ok(Launch {
        function,
        dimensions: config.dimensions,
        shared: config.shared,
        stream: config.stream,
        cooperative: false,
        parameters: parameters as *const *const u8,
        extra: extra as *const u64,
        attributes: config.attributes,
        attribute_count: if config.attributes.is_null() { 0 } else { config.attribute_count as usize },
    })
}

fn launch_with_config(frame: &Frame) -> i32 {
    let launch = configured(frame.arg(1), frame.arg(0), frame.arg(2), frame.arg(3));
    code(launch.and_then(|launch| send(&launch, frame.per_thread)))
}

fn max_clusters(frame: &Frame) -> i32 {
    let ask = || {
        let launch = configured(frame.arg(1), frame.arg(2), 0, 0)?;
        record(launch.function)?;
        if launch.attribute_count > MAX_ATTRIBUTES {
            return Err(INVALID_VALUE);
        }
        let connection = connection::get()?;
        let stream = resolve_stream(launch.stream, false)?;
        thread::with(|thread| {
            let answer = connection.ask(thread, own::MAX_CLUSTERS, None, |message| {
                append_head(message, &launch, stream, 0);
                // SAFETY: the launch comes from the program.
                unsafe { append_attributes(message, &launch) };
            })?;
            match answer.code {
                0 => Ok(answer.inline(connection, 1).first().copied().unwrap_or_default() as i32),
                code => Err(code),
            }
        })
    };
    ask().map_or_else(|error| error, |clusters| frame.put(0, clusters))
}

/// Appends the words that precede the parameters.
fn append_head(message: &mut Vec<u64>, launch: &Launch, stream: u64, parameter_words: u64) {
    let [gx, gy, gz, bx, by, bz] = launch.dimensions.map(u64::from);
    message.extend([
        launch.function,
        gx | gy << 32,
        gz | bx << 32,
        by | bz << 32,
        u64::from(launch.shared) | (launch.attribute_count as u64) << 32,
        stream,
        u64::from(launch.cooperative),
        parameter_words,
    ]);
}

/// Appends a launch's attributes.
///
/// # Safety
/// The launch must come from the program.
unsafe fn append_attributes(message: &mut Vec<u64>, launch: &Launch) {
    for index in 0..launch.attribute_count {
        // SAFETY: the program passes `attribute_count` attributes.
        message.extend(unsafe { launch.attributes.add(index).read_unaligned() });
    }
}
