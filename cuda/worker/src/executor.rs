//! Executes the messages in a program's rings.

use std::collections::{BTreeSet, HashMap};
use std::io::Write as _;

use cuda_calls::own::{self, Route, flags};
use cuda_calls::{Arena, CALLS, Fault, Handles as _, Kind, Prepared, Treatment, decode, handle};
use cuda_ring::{ADDRESSES, Header, Shared, Words as _, control, slots, state};
use object_log::{Log, Outcome};

use crate::driver::{Driver, NOT_SUPPORTED, Needed};
use crate::objects::{Objects, TooMany};
use crate::output::Output;
use crate::pending::{Linked, Origin, Wait, Waits};
use crate::processes;
use crate::window::Window;

/// Reason why a message destroys its program's context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The message is invalid.
    Malformed,
    /// The program has exceeded a limit.
    Limit,
}

impl From<TooMany> for Broken {
    fn from(_: TooMany) -> Self {
        Self::Limit
    }
}

/// Effect of a call on the worker's records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    None,
    /// The first result is an address, and the argument with this index is the size in bytes.
    Allocates(usize),
    /// The first two results are an address and the row pitch in bytes. The fourth argument is the number of rows.
    AllocatesRows,
    /// The first two results are an address and a size in bytes.
    Names,
    /// The first argument is an address.
    Frees,
    /// Reserves addresses, which the worker chooses if the program does not.
    Reserves,
    /// The call changes the driver's current context.
    ChangesContext,
    /// Releases or resets the primary context of the device in the first argument.
    EndsPrimary,
    /// The results are a list of processes.
    ListsProcesses,
    /// Begins a capture on a stream.
    BeginsCapture,
    /// Ends the capture on the stream in the first argument.
    EndsCapture,
}

fn effect(name: &str) -> Effect {
    match name {
        "cuMemAlloc_v2+" | "cuMemAllocAsync+" | "cuMemAllocFromPoolAsync+" => Effect::Allocates(1),
        "cuModuleGetGlobal_v2+" | "cuLibraryGetGlobal+" | "cuLibraryGetManaged+" => Effect::Names,
        "cuMemAllocPitch_v2+" => Effect::AllocatesRows,
        "cuMemFree_v2+" | "cuMemFree_v2-" | "cuMemFreeAsync" | "cuMemAddressFree" => Effect::Frees,
        "cuMemAddressReserve" => Effect::Reserves,
        "cuCtxCreate_v2+" | "cuCtxDestroy_v2+" => Effect::ChangesContext,
        "cuDevicePrimaryCtxReset_v2+" | "cuDevicePrimaryCtxRelease_v2+" => Effect::EndsPrimary,
        "nvmlDeviceGetComputeRunningProcesses_v3+" => Effect::ListsProcesses,
        "cuStreamBeginCapture" | "cuStreamBeginCapture_v2" => Effect::BeginsCapture,
        "cuStreamEndCapture" => Effect::EndsCapture,
        _ => Effect::None,
    }
}

/// First address for the program's own reservations. The shim uses lower addresses.
const RESERVATIONS: u64 = ADDRESSES.start + (8 << 40);

/// Returns true if an error makes the context unusable.
fn is_sticky(code: i32) -> bool {
    matches!(code, 214 | 220 | 700 | 702 | 710 | 714..=719)
}

/// Offsets and sizes of a function's parameters, in bytes.
pub type Parameters = Vec<(u32, u32)>;

/// Executes the messages of one program.
pub struct Executor {
    pub(crate) driver: Driver,
    pub(crate) objects: Objects,
    pub(crate) control: Shared,
    pub(crate) window: Window,
    pub(crate) waits: Waits,
    pub(crate) parameters: HashMap<u64, Parameters, foldhash::fast::FixedState>,
    pub(crate) staging: Option<u32>,
    pub(crate) linked: Linked,
    /// Upper bound on the number of open captures. If it is 0, no stream is being captured.
    pub(crate) captures: u64,
    /// Object log that lets another worker continue the program.
    pub(crate) log: Log,
    /// Result code of the last call.
    pub(crate) last_code: i32,
    /// Set while steps of a log are executed, without replies.
    pub(crate) is_replaying: bool,
    /// The program's process ID in the guest.
    pub(crate) process: u32,
    /// Number of replies so far, indexed by slot.
    pub(crate) counts: Vec<u64>,
    pub(crate) next_reservation: u64,
    pub(crate) started: bool,
    pub(crate) output: Output,
    arena: Arena,
    effects: Vec<Effect>,
    current: Option<u32>,
    mode: u16,
    /// Failures that have already been reported, as pairs of message type and error code.
    reported: BTreeSet<(u16, i32)>,
}

/// Maximum number of reported failures per program.
const MAX_REPORTED: usize = 64;

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("current", &self.current).finish_non_exhaustive()
    }
}

impl Executor {
    /// Creates an executor for a program. `control` is its control blob.
    pub fn new(driver: Driver, control: Shared, window: Window) -> Self {
        Self {
            driver,
            control,
            window,
            objects: Objects::default(),
            waits: Waits::default(),
            parameters: HashMap::default(),
            staging: None,
            linked: Linked::default(),
            captures: 0,
            log: Log::default(),
            last_code: 0,
            is_replaying: false,
            process: 0,
            counts: vec![0; control::SLOT_COUNT as usize],
            arena: Arena::default(),
            effects: CALLS.iter().map(|call| effect(call.name)).collect(),
            // A new thread has no context. The driver would reject setting one before `cuInit`.
            current: Some(0),
            mode: 0,
            next_reservation: RESERVATIONS,
            started: false,
            output: Output::default(),
            reported: BTreeSet::new(),
        }
    }

    /// Returns the window that is shared with the guest.
    pub fn window(&mut self) -> &mut Window {
        &mut self.window
    }

    /// Executes a message, which is a private copy of the ring's words.
    ///
    /// # Errors
    /// Returns an error if the message destroys the program's context.
    pub fn execute(&mut self, message: &[u64]) -> Result<(), Broken> {
        let [header, route, words @ ..] = message else { return Err(Broken::Malformed) };
        let origin = Origin { header: Header::from_word(*header), route: Route::from_word(*route) };
        if u64::from(origin.route.slot) >= control::SLOT_COUNT {
            return Err(Broken::Malformed);
        }
        if origin.header.op == own::START {
            return self.start(origin, words);
        }
        if !self.started {
            return Err(Broken::Malformed);
        }
        if origin.header.op == own::OUTPUT {
            return self.take_output(origin, words);
        }
        self.set_mode(origin.route.capture_mode);
        if let Err(code) = self.enter(origin.route.context) {
            self.finish(origin, code, &[]);
            return Ok(());
        }
        self.dispatch(origin, words)?;
        // Results of described calls are recorded in `dispatch`.
        let is_recorded = matches!(
            origin.header.op,
            own::FUNCTION_INFO | own::PIN | own::STAGING | own::GRAPH_KERNEL | own::GRAPH_HOST
        );
        if self.captures > 0 && self.last_code == 0 {
            self.record_captured(origin, words);
        }
        if is_recorded && self.last_code == 0 {
            let [_, graph, node, ..] = *words else {
                self.log.own(origin.header.op, origin.route, words, None, None);
                return Ok(());
            };
            self.log.own(origin.header.op, origin.route, words, Some(node), Some(graph));
        }
        Ok(())
    }

    fn dispatch(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        match origin.header.op {
            op if op < own::FIRST => self.described(usize::from(op), origin, words),
            own::WAIT_STREAM | own::WAIT_EVENT | own::WAIT_CONTEXT => self.wait(origin, words),
            own::FUNCTION_INFO => self.function_info(origin, words),
            own::LAUNCH | own::MAX_CLUSTERS => self.launch(origin, words),
            own::COPY_INLINE | own::COPY_IN | own::COPY_OUT => self.copy(origin, words),
            own::IMAGE_PART => {
                self.image_part(words)?;
                // A program that waits for each reply also waits for this one.
                self.finish(origin, 0, &[]);
                Ok(())
            }
            own::PIN | own::UNPIN | own::STAGING => self.pinned(origin, words),
            own::HOST_FUNCTION => self.host_function(origin, words),
            own::COPY_BOX => self.copy_box(origin, words),
            own::GRAPH_KERNEL => self.kernel_node(origin, words),
            own::GRAPH_HOST => self.host_node(origin, words),
            own::LINK_COMPLETE | own::LINK_READ => self.link(origin, words),
            own::FUNCTION_NAME => self.function_name(origin, words),
            _ => Err(Broken::Malformed),
        }
    }

    fn start(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let [version, calls, process] = *words else { return Err(Broken::Malformed) };
        self.process = process as u32;
        processes::name_after(self.process);
        let matches = version == cuda_ring::VERSION && calls == CALLS.len() as u64;
        self.started = matches;
        // Report this side's versions. If they differ, the guest reports which side must be updated.
        self.finish(origin, if matches { 0 } else { NOT_SUPPORTED }, &[cuda_ring::VERSION, CALLS.len() as u64]);
        Ok(())
    }

    /// Replies with output of kernels.
    fn take_output(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let needed = flags::ANSWER | flags::AREA;
        if !words.is_empty() || origin.header.flags & needed != needed {
            return Err(Broken::Malformed);
        }
        let results = self.output.take(&self.control);
        self.finish(origin, 0, &results);
        Ok(())
    }

    /// Makes a context current.
    pub(crate) fn enter(&mut self, context: u32) -> Result<(), i32> {
        if self.current == Some(context) {
            return Ok(());
        }
        let real = match context {
            0 => 0,
            number => match self.objects.find(Kind::Context, handle(Kind::Context, number)) {
                Ok(real) => real,
                Err(Fault::Refused(code)) => return Err(code),
                Err(Fault::Malformed) => return Err(201),
            },
        };
        self.current = None;
        match self.driver.invoke(Needed::SetCurrent, &[real]) {
            0 => {
                self.current = Some(context);
                Ok(())
            }
            code => Err(code),
        }
    }

    /// Sets this thread's capture mode.
    pub(crate) fn set_mode(&mut self, mode: u16) {
        if self.mode != mode && mode <= 2 {
            let mut value = i32::from(mode);
            self.driver.invoke(Needed::CaptureMode, &[(&raw mut value).addr() as u64]);
            self.mode = mode;
        }
    }

    fn described(&mut self, index: usize, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let call = CALLS.get(index).filter(|call| call.treatment != Treatment::Guest).ok_or(Broken::Malformed)?;
        let mut prepared = match decode(call, words, &self.objects, &mut self.arena) {
            Ok(prepared) => prepared,
            Err(Fault::Malformed) => return Err(Broken::Malformed),
            Err(Fault::Refused(code)) => {
                self.finish(origin, code, &[]);
                return Ok(());
            }
        };
        let effect = self.effects.get(index).copied().unwrap_or(Effect::None);
        if effect == Effect::Reserves {
            self.place_reservation(&mut prepared);
        }
        let code = self.driver.call(index, &prepared.values);
        let mut known = None;
        if let Some((kind, made, _)) = prepared.new {
            let (value, context) = (prepared.made(&self.arena), origin.route.context);
            match (code, call.treatment) {
                (0, Treatment::Answered) => {
                    // If the driver returns the same object from several calls, the guest must get the same handle.
                    let found = self.objects.insert_or_find(kind, made, value, context, prepared.owner)?;
                    known = Some(found).filter(|of| *of != made);
                }
                (0, _) => self.objects.insert(made, Ok(value), context)?,
                // No record is needed, because the reply reports the failed creation to the guest.
                (_, Treatment::Answered) => {}
                (code, _) => self.objects.insert(made, Err(code), context)?,
            }
        }
        if matches!(effect, Effect::ChangesContext | Effect::EndsPrimary) {
            self.current = None;
            // The driver has written the output of the context that it has destroyed.
            self.output.collect(&self.control);
        }
        let [first, ..] = prepared.values;
        // If ending a capture fails, the capture may still be open.
        if effect == Effect::EndsCapture && (code == 0 || !self.is_capturing(first)) {
            self.captures = self.captures.saturating_sub(1);
        }
        if effect == Effect::EndsCapture && code != 0 {
            self.log.break_captures();
        }
        let mut results: Vec<u64> = Vec::new();
        if code == 0 {
            let mut ended = Vec::new();
            if let Some((_, dropped)) = prepared.dropped {
                ended = self.objects.remove(dropped);
                for ended in &ended {
                    self.parameters.remove(ended);
                }
            }
            if let Some((kind, number)) = prepared.dropped_number {
                self.objects.remove_number(kind, number);
            }
            results.extend(prepared.results(&self.arena));
            if let (Some(kind), Some(number)) = (prepared.new_number, results.first()) {
                self.objects.add_number(kind, *number)?;
            }
            if effect == Effect::ListsProcesses {
                processes::translate(&mut results);
            }
            ended.extend(self.record(effect, &prepared, &results, origin.route.context)?);
            let outcome = Outcome {
                made: known.or(prepared.new.map(|(_, made, _)| made)),
                is_known: known.is_some(),
                owner: prepared.owner,
                dropped: prepared.dropped.map(|(_, dropped)| dropped),
                ended: &ended,
                values: &prepared.values,
                results: &results,
                image: (&self.objects.image, self.objects.image_bytes),
                is_captured: self.is_captured(call, &prepared),
                captures: self.captures,
            };
            self.log.described(index, origin.route, words, &outcome);
            results.extend(known);
        }
        self.finish(origin, code, &results);
        Ok(())
    }

    /// Chooses the address of a reservation if the program does not request one.
    fn place_reservation(&mut self, prepared: &mut Prepared) {
        let [_, bytes, align, wish, ..] = &mut prepared.values;
        let at = self.next_reservation.checked_next_multiple_of((*align).max(2 << 20));
        let end = at.and_then(|at| at.checked_add(*bytes)).filter(|end| *end <= cuda_ring::PINNED_ADDRESSES);
        if let (0, Some(at), Some(end)) = (*wish, at, end) {
            *wish = at;
            self.next_reservation = end;
        }
    }

    /// Records the effect of a successful call. Returns the handles of the objects that were destroyed with a primary
    /// context.
    fn record(
        &mut self,
        effect: Effect,
        prepared: &Prepared,
        results: &[u64],
        context: u32,
    ) -> Result<Vec<u64>, Broken> {
        let result = |at: usize| results.get(at).copied().unwrap_or_default();
        let value = |at: usize| prepared.values.get(at).copied().unwrap_or_default();
        match effect {
            Effect::Allocates(bytes) => self.objects.add_range(result(0), value(bytes), context)?,
            Effect::AllocatesRows => self.objects.add_range(result(0), result(1).saturating_mul(value(3)), context)?,
            Effect::Names => self.objects.add_range(result(0), result(1), context)?,
            // Reserved addresses do not belong to a context.
            Effect::Reserves => self.objects.add_range(result(0), value(1), 0)?,
            Effect::Frees => self.objects.remove_range(value(0)),
            // The index in the guest's handle for a primary context is the device number plus one.
            Effect::EndsPrimary => {
                return Ok(self.objects.remove(handle(Kind::Context, (value(0) as u32).wrapping_add(1))));
            }
            Effect::BeginsCapture => self.captures += 1,
            Effect::None | Effect::ChangesContext | Effect::ListsProcesses | Effect::EndsCapture => {}
        }
        Ok(Vec::new())
    }

    /// Replies to a call with its results. If the call does not request a reply, records its error.
    pub(crate) fn finish(&mut self, origin: Origin, code: i32, results: &[u64]) {
        self.last_code = code;
        if self.is_replaying {
            return;
        }
        if is_sticky(code) {
            self.control.store(control::STICKY, u64::from(code.cast_unsigned()));
        }
        let (slot, flags) = (origin.route.slot, origin.header.flags);
        if flags & flags::ANSWER == 0 {
            if code != 0 {
                self.defer(origin, code);
                self.report(origin.header.op, code);
            }
            return;
        }
        if self.output.has_printed() {
            self.output.collect(&self.control);
        }
        if results.len() <= slots::INLINE_WORDS {
            self.control.write(slots::data(slot), results);
        } else if flags & flags::AREA != 0 && results.len() as u64 * 8 <= control::AREA_BYTES {
            self.control.write(slots::area(flags & flags::AREA_NUMBER), results);
        }
        if let Some(count) = self.counts.get_mut(usize::from(slot)) {
            *count += 1;
            slots::answer(&self.control, slot, *count, code, results.len());
        }
    }

    /// Makes the thread's next call return an error.
    pub(crate) fn defer(&self, origin: Origin, code: i32) {
        self.control.store(slots::deferred(origin.route.slot), u64::from(code.cast_unsigned()));
    }

    /// Logs the failure of a call without a reply, once for each pair of message type and error. A later call returns
    /// the error to the program.
    fn report(&mut self, op: u16, code: i32) {
        if self.reported.len() >= MAX_REPORTED || !self.reported.insert((op, code)) {
            return;
        }
        let call = CALLS.get(usize::from(op)).map_or("a call with its own message", |call| call.name);
        let text = "the program gets the error from its next call";
        // Ignore errors, because the reader of standard error may have exited with the daemon.
        let _ = writeln!(std::io::stderr(), "cuda-worker: {call} ({op:#x}) has failed with error {code}; {text}");
    }

    fn wait(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let found = match (origin.header.op, words) {
            (own::WAIT_CONTEXT, []) => {
                let mut streams = self.objects.streams_of(origin.route.context);
                streams.push(0);
                Ok(Wait::Context(streams))
            }
            (own::WAIT_STREAM, [stream]) => self.objects.find(Kind::Stream, *stream).map(Wait::Stream),
            (own::WAIT_EVENT, [event]) => self.objects.find(Kind::Event, *event).map(Wait::Event),
            _ => Err(Fault::Malformed),
        };
        match found {
            Ok(wait) => self.begin_wait(origin, wait),
            Err(Fault::Refused(code)) => {
                self.finish(origin, code, &[]);
                Ok(())
            }
            Err(Fault::Malformed) => Err(Broken::Malformed),
        }
    }

    fn image_part(&mut self, words: &[u64]) -> Result<(), Broken> {
        let [first, bytes, data @ ..] = words else { return Err(Broken::Malformed) };
        let bytes = usize::try_from(*bytes).map_err(|_| Broken::Malformed)?;
        let objects = &mut self.objects;
        if *first == 1 {
            objects.image.clear();
            objects.image_bytes = 0;
        }
        let fits = data.len() == bytes.div_ceil(8) && bytes <= own::IMAGE_PART_BYTES;
        // Only the last part may have a size that is not a multiple of the word size.
        if !fits || !objects.image_bytes.is_multiple_of(8) || objects.image_bytes + bytes > own::MAX_IMAGE_BYTES {
            return Err(Broken::Malformed);
        }
        objects.image.truncate(objects.image_bytes / 8);
        objects.image.extend_from_slice(data);
        objects.image_bytes += bytes;
        // Always NUL-terminate the image, because it may be text.
        objects.image.push(0);
        Ok(())
    }

    /// Returns true once the guest has started with matching versions.
    pub fn is_started(&self) -> bool {
        self.started
    }

    /// Notifies the guest that the worker serves the rings.
    pub fn announce(&self) {
        self.control.store(control::STATE, state::READY);
    }
}
