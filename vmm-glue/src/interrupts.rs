//! Interrupts of one device: the client's event descriptors and the pending interrupts.
//!
//! INTx is level-triggered and auto-masked: raising the level signals once and masks INTx. If the level is still high
//! when the client unmasks INTx, INTx is signalled again. MSI and MSI-X are edge-triggered. An edge without a
//! descriptor stays pending until the client attaches one, so that no edge is lost while a client switches from INTx to
//! MSI. The edge is dropped when the client disables the interrupt type.
//!
//! This module never waits for a client: `event` signals the client's descriptors.

mod saved;

pub(crate) use saved::SavedInterrupts;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use thiserror::Error;

use crate::event::ClientEvent;
use crate::protocol::{
    IRQ_ACTION_MASK, IRQ_ACTION_TRIGGER, IRQ_ACTION_UNMASK, IRQ_DATA_BOOL, IRQ_DATA_EVENTFD, IRQ_DATA_NONE,
    IRQ_INFO_AUTOMASKED, IRQ_INFO_EVENTFD, IRQ_INFO_MASKABLE, IRQ_INFO_NORESIZE, IrqSet,
};

/// Number of interrupt types of a PCI function: INTx, MSI, MSI-X, error, device request.
pub const NUM_IRQ_TYPES: usize = 5;

/// Maximum number of MSI or MSI-X vectors that a device can request.
pub const MAX_VECTORS: u32 = 2048;

const INTX: usize = 0;
const MSI: usize = 1;
const MSIX: usize = 2;
const ERR: usize = 3;
const REQ: usize = 4;

/// Number of interrupts of each type, or 0 if the device lacks the type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IrqCounts {
    /// Number of INTx interrupts, 0 or 1.
    pub intx: u32,
    /// Number of MSI vectors, up to 32.
    pub msi: u32,
    /// Number of MSI-X vectors, up to [`MAX_VECTORS`].
    pub msix: u32,
    /// Number of error interrupts, 0 or 1.
    pub err: u32,
    /// Number of interrupts that request the client to release the device, 0 or 1.
    pub req: u32,
}

/// Reasons for rejecting a `DEVICE_SET_IRQS` request. The client receives `EINVAL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum IrqError {
    #[error("interrupt type {0} does not exist; a PCI function has types 0 to 4")]
    Type(u32),
    #[error("flags {0:#x} must contain one data bit of 0x7 and one action bit of 0x38")]
    Flags(u32),
    #[error("flags {0:#x} are invalid for this interrupt type")]
    Unsuitable(u32),
    #[error("{count} interrupts from {start} exceed the {have} of type {index}")]
    Range { index: u32, start: u32, count: u32, have: usize },
    #[error("the client sent {got} bytes of booleans for {count} interrupts")]
    Booleans { got: usize, count: u32 },
    #[error("the client sent {got} file descriptors for {count} interrupts; expected 0 or {count}")]
    Descriptors { got: usize, count: u32 },
    #[error("an interrupt's file descriptor is not an eventfd")]
    NotEventfd,
}

/// Delivers an interrupt to a client that has no descriptor. Any thread may call it with the device's interrupts
/// locked, so it must neither wait nor call back.
pub type Deliver = Arc<dyn Fn() -> bool + Send + Sync>;

/// A method of signalling a client.
enum Signal {
    Event(ClientEvent),
    Deliver(Deliver),
}

impl Signal {
    fn signal(&self) -> bool {
        match self {
            Self::Event(event) => event.signal(),
            Self::Deliver(deliver) => deliver(),
        }
    }
}

impl std::fmt::Debug for Signal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Event(event) => event.fmt(f),
            Self::Deliver(_) => f.write_str("Deliver"),
        }
    }
}

#[derive(Debug, Default)]
struct Line {
    event: Option<Signal>,
    pending: bool,
}

impl Line {
    /// Signals the client, or marks the interrupt as pending. Returns true if the client was signalled.
    fn signal(&mut self) -> bool {
        self.pending = !self.event.as_ref().is_some_and(Signal::signal);
        !self.pending
    }
}

#[derive(Debug, Default)]
struct State {
    lines: [Vec<Line>; NUM_IRQ_TYPES],
    intx_level: bool,
    intx_masked: bool,
    /// Event through which the client unmasks INTx (KVM's resampling).
    unmask: Option<Arc<ClientEvent>>,
}

impl State {
    fn raise_intx(&mut self) {
        if !self.intx_level || self.intx_masked {
            return;
        }
        if let Some(Line { event: Some(event), .. }) = self.lines[INTX].first() {
            event.signal();
            self.intx_masked = true;
        }
    }

    fn detach(&mut self, index: usize) {
        for line in self.lines.get_mut(index).into_iter().flatten() {
            *line = Line::default();
        }
        if index == INTX {
            self.intx_masked = false;
            self.unmask = None;
        }
    }
}

/// The interrupts of one device. Any thread may raise them.
#[derive(Debug)]
pub struct Interrupts {
    counts: IrqCounts,
    state: Mutex<State>,
}

impl Interrupts {
    /// Creates interrupts without descriptors. Clamps the counts to the bounds of [`IrqCounts`].
    pub fn new(counts: IrqCounts) -> Self {
        let counts = IrqCounts {
            intx: counts.intx.min(1),
            msi: counts.msi.min(32),
            msix: counts.msix.min(MAX_VECTORS),
            err: counts.err.min(1),
            req: counts.req.min(1),
        };
        let lines = [counts.intx, counts.msi, counts.msix, counts.err, counts.req]
            .map(|count| (0..count).map(|_| Line::default()).collect());
        Self { counts, state: Mutex::new(State { lines, ..State::default() }) }
    }

    /// Returns the number of interrupts of each type.
    pub fn counts(&self) -> IrqCounts {
        self.counts
    }

    /// Raises an MSI vector. Returns true if the client was signalled. Otherwise, the edge stays pending until the
    /// client attaches a descriptor. Ignores vectors that the device lacks.
    pub fn trigger_msi(&self, vector: u32) -> bool {
        self.trigger(MSI, vector)
    }

    /// Raises an MSI-X vector, like [`Self::trigger_msi`].
    pub fn trigger_msix(&self, vector: u32) -> bool {
        self.trigger(MSIX, vector)
    }

    /// Reports an uncorrectable error to the client.
    pub fn trigger_err(&self) -> bool {
        self.trigger(ERR, 0)
    }

    /// Requests that the client release the device.
    pub fn trigger_req(&self) -> bool {
        self.trigger(REQ, 0)
    }

    /// Sets the level of the INTx pin.
    pub fn set_intx_level(&self, level: bool) {
        let mut state = self.state.lock();
        state.intx_level = level;
        state.raise_intx();
    }

    /// Returns the number of MSI vectors with a descriptor, or 0 while the client has MSI disabled.
    pub fn msi_attached(&self) -> usize {
        self.attached(MSI)
    }

    /// Returns the number of MSI-X vectors with a descriptor.
    pub fn msix_attached(&self) -> usize {
        self.attached(MSIX)
    }

    /// Returns true if the client uses INTx.
    pub fn intx_attached(&self) -> bool {
        self.attached(INTX) != 0
    }

    fn attached(&self, index: usize) -> usize {
        let state = self.state.lock();
        state.lines.get(index).map_or(0, |lines| lines.iter().filter(|line| line.event.is_some()).count())
    }

    fn trigger(&self, index: usize, vector: u32) -> bool {
        let mut state = self.state.lock();
        let line = state.lines.get_mut(index).and_then(|lines| lines.get_mut(usize::try_from(vector).ok()?));
        line.is_some_and(Line::signal)
    }

    /// Returns `flags` and `count` for the reply to `DEVICE_GET_IRQ_INFO`, or `None` if the type does not exist.
    pub(crate) fn info(&self, index: u32) -> Option<(u32, u32)> {
        Some(match usize::try_from(index).ok()? {
            INTX => (IRQ_INFO_EVENTFD | IRQ_INFO_MASKABLE | IRQ_INFO_AUTOMASKED, self.counts.intx),
            MSI => (IRQ_INFO_EVENTFD | IRQ_INFO_NORESIZE, self.counts.msi),
            MSIX => (IRQ_INFO_EVENTFD | IRQ_INFO_NORESIZE, self.counts.msix),
            ERR => (IRQ_INFO_EVENTFD | IRQ_INFO_NORESIZE, self.counts.err),
            REQ => (IRQ_INFO_EVENTFD | IRQ_INFO_NORESIZE, self.counts.req),
            _ => return None,
        })
    }

    /// Executes a `DEVICE_SET_IRQS` request.
    pub(crate) fn set(&self, request: &IrqSet, booleans: &[u8], fds: Vec<OwnedFd>) -> Result<(), IrqError> {
        let IrqSet { argsz: _, flags, index, start, count } = *request;
        let kind = usize::try_from(index).ok().filter(|&kind| kind < NUM_IRQ_TYPES).ok_or(IrqError::Type(index))?;
        let data = flags & (IRQ_DATA_NONE | IRQ_DATA_BOOL | IRQ_DATA_EVENTFD);
        let action = flags & (IRQ_ACTION_MASK | IRQ_ACTION_UNMASK | IRQ_ACTION_TRIGGER);
        if data.count_ones() != 1 || action.count_ones() != 1 || flags != data | action {
            return Err(IrqError::Flags(flags));
        }
        let mut state = self.state.lock();
        if action == IRQ_ACTION_TRIGGER && data == IRQ_DATA_NONE && count == 0 && start == 0 {
            state.detach(kind);
            return Ok(());
        }
        let lines = state.lines.get_mut(kind).ok_or(IrqError::Type(index))?;
        let have = lines.len();
        let range = IrqError::Range { index, start, count, have };
        let end = start.checked_add(count).filter(|_| count != 0).ok_or(range)?;
        let chosen = lines
            .get_mut(usize::try_from(start).map_err(|_| range)?..usize::try_from(end).map_err(|_| range)?)
            .ok_or(range)?;
        let wanted = |place: usize| data != IRQ_DATA_BOOL || booleans.get(place).is_some_and(|&byte| byte != 0);
        if data == IRQ_DATA_BOOL && booleans.len() != chosen.len() {
            return Err(IrqError::Booleans { got: booleans.len(), count });
        }
        if data == IRQ_DATA_EVENTFD && !fds.is_empty() && fds.len() != chosen.len() {
            return Err(IrqError::Descriptors { got: fds.len(), count });
        }
        match (action, data) {
            (IRQ_ACTION_TRIGGER, IRQ_DATA_EVENTFD) => {
                if fds.is_empty() {
                    chosen.iter_mut().for_each(|line| *line = Line::default());
                    if kind == INTX {
                        state.detach(INTX);
                    }
                    return Ok(());
                }
                let events = events(fds)?;
                for (line, event) in chosen.iter_mut().zip(events) {
                    line.event = Some(Signal::Event(event));
                    if line.pending {
                        line.signal();
                    }
                }
                if kind == INTX {
                    state.intx_masked = false;
                    state.raise_intx();
                }
            }
            (IRQ_ACTION_TRIGGER, _) => {
                for (place, line) in chosen.iter_mut().enumerate() {
                    if wanted(place) {
                        line.signal();
                    }
                }
            }
            _ if kind != INTX => return Err(IrqError::Unsuitable(flags)),
            (IRQ_ACTION_UNMASK, IRQ_DATA_EVENTFD) => {
                state.unmask = events(fds)?.into_iter().next().map(Arc::new);
            }
            (IRQ_ACTION_MASK, IRQ_DATA_EVENTFD) => return Err(IrqError::Unsuitable(flags)),
            (IRQ_ACTION_MASK, _) => state.intx_masked |= wanted(0),
            _ => {
                if wanted(0) {
                    state.intx_masked = false;
                    state.raise_intx();
                }
            }
        }
        Ok(())
    }

    /// Delivers the first MSI vector, including a pending edge, through `deliver`. `None` disables MSI.
    pub fn deliver_msi(&self, deliver: Option<Deliver>) {
        self.deliver(MSI, deliver);
    }

    /// Signals a high INTx level through `deliver`, at most once between calls of [`Self::unmask_intx`]. `None`
    /// disables INTx.
    pub fn deliver_intx(&self, deliver: Option<Deliver>) {
        self.deliver(INTX, deliver);
    }

    fn deliver(&self, kind: usize, deliver: Option<Deliver>) {
        let mut state = self.state.lock();
        let Some(deliver) = deliver else { return state.detach(kind) };
        let Some(line) = state.lines.get_mut(kind).and_then(|lines| lines.first_mut()) else { return };
        line.event = Some(Signal::Deliver(deliver));
        if line.pending {
            line.signal();
        }
        if kind == INTX {
            state.intx_masked = false;
            state.raise_intx();
        }
    }

    /// Unmasks INTx. Signals immediately if the level is still high.
    pub fn unmask_intx(&self) {
        let mut state = self.state.lock();
        state.intx_masked = false;
        state.raise_intx();
    }

    /// Returns the event through which the client unmasks INTx.
    pub(crate) fn unmask_source(&self) -> Option<Arc<ClientEvent>> {
        self.state.lock().unmask.clone()
    }

    /// If the event of [`Self::unmask_source`] is set, clears it and unmasks INTx.
    pub(crate) fn unmask_event(&self) {
        let mut state = self.state.lock();
        if state.unmask.as_ref().is_some_and(|event| event.take()) {
            state.intx_masked = false;
            state.raise_intx();
        }
    }

    /// Drops pending interrupts but keeps the descriptors.
    pub(crate) fn clear_pending(&self) {
        let mut state = self.state.lock();
        state.intx_level = false;
        state.lines.iter_mut().flatten().for_each(|line| line.pending = false);
    }

    /// Closes a disconnected client's descriptors and drops pending interrupts.
    pub fn detach_all(&self) {
        let mut state = self.state.lock();
        state.intx_level = false;
        (0..NUM_IRQ_TYPES).for_each(|index| state.detach(index));
    }
}

/// Wraps a client's descriptors, all of which must be eventfds.
fn events(fds: Vec<OwnedFd>) -> Result<Vec<ClientEvent>, IrqError> {
    fds.into_iter().map(|fd| ClientEvent::new(fd).ok_or(IrqError::NotEventfd)).collect()
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    const COUNTS: IrqCounts = IrqCounts { intx: 1, msi: 4, msix: 0, err: 0, req: 1 };

    fn pair() -> (OwnedFd, OwnedFd) {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        (fd.try_clone().unwrap(), fd)
    }

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
    }

    fn set(flags: u32, index: u32, start: u32, count: u32) -> IrqSet {
        IrqSet { argsz: 20, flags, index, start, count }
    }

    const ATTACH: u32 = IRQ_DATA_EVENTFD | IRQ_ACTION_TRIGGER;
    const UNMASK: u32 = IRQ_DATA_NONE | IRQ_ACTION_UNMASK;
    const MASK: u32 = IRQ_DATA_NONE | IRQ_ACTION_MASK;
    const TRIGGER_WITHOUT_DATA: u32 = IRQ_DATA_NONE | IRQ_ACTION_TRIGGER;

    #[test]
    fn intx_signals_once_per_unmask_while_level_is_raised() {
        let irqs = Interrupts::new(COUNTS);
        let (theirs, ours) = pair();
        irqs.set(&set(ATTACH, 0, 0, 1), &[], vec![theirs]).unwrap();
        irqs.set_intx_level(true);
        irqs.set_intx_level(true);
        assert_eq!(count(&ours), 1);
        irqs.set(&set(UNMASK, 0, 0, 1), &[], vec![]).unwrap();
        assert_eq!(count(&ours), 1, "the level is still high");
        irqs.set_intx_level(false);
        irqs.set(&set(UNMASK, 0, 0, 1), &[], vec![]).unwrap();
        assert_eq!(count(&ours), 0, "the level has dropped");
    }

    #[test]
    fn intx_level_toggled_while_masked_signals_on_unmask() {
        let irqs = Interrupts::new(COUNTS);
        let (theirs, ours) = pair();
        irqs.set(&set(ATTACH, 0, 0, 1), &[], vec![theirs]).unwrap();
        irqs.set(&set(MASK, 0, 0, 1), &[], vec![]).unwrap();
        irqs.set_intx_level(true);
        irqs.set_intx_level(false);
        irqs.set_intx_level(true);
        assert_eq!(count(&ours), 0);
        irqs.set(&set(UNMASK, 0, 0, 1), &[], vec![]).unwrap();
        assert_eq!(count(&ours), 1);
    }

    #[test]
    fn intx_level_raised_without_descriptor_signals_on_attach() {
        let irqs = Interrupts::new(COUNTS);
        irqs.set_intx_level(true);
        let (theirs, ours) = pair();
        irqs.set(&set(ATTACH, 0, 0, 1), &[], vec![theirs]).unwrap();
        assert_eq!(count(&ours), 1);
    }

    #[test]
    fn unmask_descriptor_unmasks_intx() {
        let irqs = Interrupts::new(COUNTS);
        let (theirs, ours) = pair();
        let (unmask_theirs, unmask_ours) = pair();
        irqs.set(&set(ATTACH, 0, 0, 1), &[], vec![theirs]).unwrap();
        irqs.set(&set(IRQ_DATA_EVENTFD | IRQ_ACTION_UNMASK, 0, 0, 1), &[], vec![unmask_theirs]).unwrap();
        irqs.set_intx_level(true);
        irqs.unmask_event();
        assert_eq!(count(&ours), 1, "no event has arrived yet");
        rustix::io::write(&unmask_ours, &1u64.to_ne_bytes()).unwrap();
        irqs.unmask_event();
        assert_eq!(count(&ours), 1);
    }

    #[test]
    fn msi_edge_without_descriptor_is_delivered_on_attach() {
        let irqs = Interrupts::new(COUNTS);
        assert!(!irqs.trigger_msi(2));
        let (theirs, ours) = pair();
        irqs.set(&set(ATTACH, 1, 2, 1), &[], vec![theirs]).unwrap();
        assert_eq!(count(&ours), 1);
        assert!(irqs.trigger_msi(2));
        assert_eq!(count(&ours), 1);
        assert_eq!(irqs.msi_attached(), 1);
    }

    #[test]
    fn msi_turned_off_forgets_its_edges() {
        let irqs = Interrupts::new(COUNTS);
        irqs.trigger_msi(0);
        irqs.set(&set(TRIGGER_WITHOUT_DATA, 1, 0, 0), &[], vec![]).unwrap();
        let (theirs, ours) = pair();
        irqs.set(&set(ATTACH, 1, 0, 1), &[], vec![theirs]).unwrap();
        assert_eq!(count(&ours), 0);
    }

    #[test]
    fn client_may_trigger_by_booleans() {
        let irqs = Interrupts::new(COUNTS);
        let (a, ours_a) = pair();
        let (b, ours_b) = pair();
        irqs.set(&set(ATTACH, 1, 0, 2), &[], vec![a, b]).unwrap();
        irqs.set(&set(IRQ_DATA_BOOL | IRQ_ACTION_TRIGGER, 1, 0, 2), &[0, 1], vec![]).unwrap();
        assert_eq!((count(&ours_a), count(&ours_b)), (0, 1));
    }

    #[test]
    fn bad_requests_are_refused() {
        let irqs = Interrupts::new(COUNTS);
        let refused = |request, booleans: &[u8]| irqs.set(&request, booleans, vec![]).unwrap_err();
        assert_eq!(refused(set(TRIGGER_WITHOUT_DATA, 5, 0, 1), &[]), IrqError::Type(5));
        assert_eq!(refused(set(0, 0, 0, 1), &[]), IrqError::Flags(0));
        assert_eq!(refused(set(0x3f, 0, 0, 1), &[]), IrqError::Flags(0x3f));
        assert_eq!(
            refused(set(TRIGGER_WITHOUT_DATA | 0x40, 0, 0, 1), &[]),
            IrqError::Flags(TRIGGER_WITHOUT_DATA | 0x40)
        );
        assert!(matches!(refused(set(TRIGGER_WITHOUT_DATA, 1, 3, 2), &[]), IrqError::Range { .. }));
        assert!(matches!(refused(set(TRIGGER_WITHOUT_DATA, 1, u32::MAX, 2), &[]), IrqError::Range { .. }));
        assert!(matches!(refused(set(UNMASK, 0, 0, 0), &[]), IrqError::Range { .. }));
        assert!(matches!(refused(set(TRIGGER_WITHOUT_DATA, 2, 0, 1), &[]), IrqError::Range { have: 0, .. }));
        assert!(matches!(refused(set(MASK, 1, 0, 1), &[]), IrqError::Unsuitable(_)));
        let booleans = set(IRQ_DATA_BOOL | IRQ_ACTION_TRIGGER, 1, 0, 2);
        assert!(matches!(refused(booleans, &[1]), IrqError::Booleans { got: 1, count: 2 }));
    }

    #[test]
    fn type_without_interrupts_may_be_turned_off() {
        Interrupts::new(COUNTS).set(&set(TRIGGER_WITHOUT_DATA, 2, 0, 0), &[], vec![]).unwrap();
    }

    #[test]
    fn descriptor_that_is_no_eventfd_is_refused() {
        let irqs = Interrupts::new(COUNTS);
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(irqs.set(&set(ATTACH, 1, 0, 1), &[], vec![reader]), Err(IrqError::NotEventfd));
    }
}
