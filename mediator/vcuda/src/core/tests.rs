//! Tests with fixed and random sequences of steps. The actions of random sequences are checked against the rules for
//! the window, tickets and workers.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::fuzz::{self, Step};

const WINDOW: u64 = 1 << 20;

#[derive(Default)]
struct Memory(RefCell<BTreeMap<u64, u64>>);

impl Words for Memory {
    fn load(&self, offset: u64) -> u64 {
        assert!(offset.is_multiple_of(8) && offset < WINDOW);
        self.0.borrow().get(&offset).copied().unwrap_or(0)
    }
}

struct Bench {
    core: Core,
    memory: Memory,
    tickets: u64,
}

impl Bench {
    fn new() -> Self {
        let limits = Limits { window_bytes: WINDOW, workers: 2 };
        Self { core: Core::new(limits), memory: Memory::default(), tickets: 0 }
    }

    fn send(&mut self, context: u32, command: Command) -> Option<Answer> {
        self.tickets += 1;
        let header = fuzz::header(context);
        self.core.command(&header, command, Ticket(self.tickets), &self.memory, 0)
    }

    /// Creates context `id`, with a blob mapped at page `page`.
    fn program(&mut self, id: u32, page: u64) -> Option<Answer> {
        self.send(id, Command::CreateContext { capset: 24, name: "p".to_owned() });
        self.send(id, Command::CreateBlob { resource: id, blob: u64::from(KIND_CONTROL), size: PAGE_BYTES });
        self.send(0, Command::MapBlob { resource: id, offset: page * PAGE_BYTES })
    }

    fn actions(&mut self) -> Vec<Action> {
        self.core.take_actions()
    }
}

fn page(number: u64) -> Range {
    Range { offset: number * PAGE_BYTES, size: PAGE_BYTES }
}

#[test]
fn mapping_zeroes_range_and_starts_one_worker() {
    let mut bench = Bench::new();
    assert_eq!(bench.program(1, 3), Some(Answer::Mapped));
    let worker = WorkerId(1);
    let blob = Action::Blob { worker, blob: 0, kind: KIND_CONTROL, serial: 1, range: page(3) };
    assert_eq!(bench.actions(), [Action::Zero { range: page(3) }, Action::Start { worker }, blob]);
    bench.send(1, Command::CreateBlob { resource: 9, blob: 1 << 32 | 2, size: PAGE_BYTES });
    bench.send(0, Command::MapBlob { resource: 9, offset: 0 });
    let blob = Action::Blob { worker, blob: 1, kind: 2, serial: 2, range: page(0) };
    assert_eq!(bench.actions(), [Action::Zero { range: page(0) }, blob]);
}

#[test]
fn context_without_our_capset_gets_no_mapping() {
    let mut bench = Bench::new();
    for (id, capset) in [(1, 0), (2, 4)] {
        bench.send(id, Command::CreateContext { capset, name: String::new() });
        bench.send(id, Command::CreateBlob { resource: id, blob: 1, size: PAGE_BYTES });
        assert_eq!(bench.send(0, Command::MapBlob { resource: id, offset: 0 }), Some(Answer::NoResource));
        assert_eq!(bench.send(id, Command::Submit(Submission::Doorbell)), Some(Answer::Ok));
    }
    assert_eq!(bench.actions(), []);
}

#[test]
fn mapping_outside_or_over_another_blob_is_refused() {
    let mut bench = Bench::new();
    bench.program(1, 1);
    bench.send(1, Command::CreateBlob { resource: 2, blob: 1 << 32, size: 2 * PAGE_BYTES });
    let last = WINDOW - PAGE_BYTES;
    for offset in [0, PAGE_BYTES, 2 * PAGE_BYTES + 8, last, WINDOW, u64::MAX - 0xfff, u64::MAX] {
        assert_eq!(bench.send(0, Command::MapBlob { resource: 2, offset }), Some(Answer::Invalid), "{offset:#x}");
    }
    assert_eq!(bench.send(0, Command::MapBlob { resource: 2, offset: 2 * PAGE_BYTES }), Some(Answer::Mapped));
}

#[test]
fn program_beyond_the_limit_is_refused_until_a_worker_has_ended() {
    let mut bench = Bench::new();
    bench.program(1, 1);
    bench.program(2, 2);
    assert_eq!(bench.program(3, 3), Some(Answer::OutOfMemory));
    bench.send(1, Command::DestroyContext);
    assert_eq!(bench.send(0, Command::MapBlob { resource: 3, offset: 0x3000 }), Some(Answer::OutOfMemory));
    bench.core.exited(WorkerId(1));
    assert_eq!(bench.send(0, Command::MapBlob { resource: 3, offset: 0x3000 }), Some(Answer::Mapped));
}

#[test]
fn wait_is_answered_when_its_word_reaches_the_value() {
    let mut bench = Bench::new();
    bench.program(1, 1);
    bench.actions();
    let wait = |value| Command::Submit(Submission::Wait { blob: 0, offset: 16, value });
    assert_eq!(bench.send(1, wait(0)), Some(Answer::Ok));
    assert_eq!(bench.send(1, wait(5)), None);
    let ticket = Ticket(bench.tickets);
    bench.memory.0.borrow_mut().insert(PAGE_BYTES + 16, 4);
    bench.core.check(WorkerId(1), &bench.memory);
    assert_eq!(bench.actions(), []);
    bench.memory.0.borrow_mut().insert(PAGE_BYTES + 16, 6);
    bench.core.check(WorkerId(2), &bench.memory);
    assert_eq!(bench.actions(), []);
    bench.core.check(WorkerId(1), &bench.memory);
    assert_eq!(bench.actions(), [Action::Answer { ticket, answer: Answer::Ok }]);
    assert!(!bench.core.has_waits());
}

#[test]
fn unref_is_answered_after_the_worker_and_zeroes_range() {
    let mut bench = Bench::new();
    bench.program(1, 1);
    bench.actions();
    assert_eq!(bench.send(0, Command::UnmapBlob { resource: 1 }), Some(Answer::Ok));
    assert_eq!(bench.send(0, Command::Unref { resource: 1 }), None);
    let ticket = Ticket(bench.tickets);
    assert_eq!(bench.actions(), [Action::Remove { worker: WorkerId(1), blob: 0, serial: 1 }]);
    bench.send(1, Command::CreateBlob { resource: 2, blob: 1 << 32, size: PAGE_BYTES });
    assert_eq!(bench.send(0, Command::MapBlob { resource: 2, offset: PAGE_BYTES }), Some(Answer::Invalid));
    bench.core.removed(WorkerId(1), 0, 1);
    assert_eq!(bench.actions(), [Action::Zero { range: page(1) }, Action::Answer { ticket, answer: Answer::Ok }]);
    assert_eq!(bench.send(0, Command::MapBlob { resource: 2, offset: PAGE_BYTES }), Some(Answer::Mapped));
}

#[test]
fn removal_by_worker_that_waits_for_its_slice_has_no_limit() {
    let mut bench = Bench::new();
    bench.program(1, 1);
    bench.actions();
    bench.send(0, Command::Unref { resource: 1 });
    let ticket = Ticket(bench.tickets);
    assert_eq!(bench.actions(), [Action::Remove { worker: WorkerId(1), blob: 0, serial: 1 }]);
    bench.core.tick(u64::MAX);
    assert_eq!((bench.actions(), bench.core.next_tick()), (vec![], None));
    bench.core.removed(WorkerId(1), 0, 1);
    assert_eq!(bench.actions(), [Action::Zero { range: page(1) }, Action::Answer { ticket, answer: Answer::Ok }]);
}

#[test]
fn guest_process_death_answers_waits_and_ends_worker() {
    let mut bench = Bench::new();
    bench.program(1, 1);
    bench.send(1, Command::Submit(Submission::Wait { blob: 0, offset: 0, value: 1 }));
    let wait = Ticket(bench.tickets);
    bench.actions();
    // The driver first destroys the context and then drops the blobs.
    assert_eq!(bench.send(1, Command::DestroyContext), Some(Answer::Ok));
    let worker = WorkerId(1);
    assert_eq!(bench.actions(), [Action::Answer { ticket: wait, answer: Answer::Ok }, Action::Leave { worker }]);
    assert_eq!(bench.send(0, Command::Unref { resource: 1 }), None);
    let unref = Ticket(bench.tickets);
    bench.core.tick(LEAVE_NS - 1);
    assert_eq!(bench.actions(), [Action::Remove { worker, blob: 0, serial: 1 }]);
    bench.core.tick(LEAVE_NS);
    assert_eq!(bench.actions(), [Action::Kill { worker }]);
    bench.core.exited(worker);
    assert_eq!(
        bench.actions(),
        [Action::Zero { range: page(1) }, Action::Answer { ticket: unref, answer: Answer::Ok }]
    );
    assert!(bench.core.is_quiet());
}

#[test]
fn worker_death_marks_context_as_lost_and_answers_waits() {
    let mut bench = Bench::new();
    bench.program(1, 1);
    bench.send(1, Command::Submit(Submission::Wait { blob: 0, offset: 0, value: 1 }));
    let ticket = Ticket(bench.tickets);
    bench.actions();
    bench.core.exited(WorkerId(1));
    let answer = Action::Answer { ticket, answer: Answer::Ok };
    assert_eq!(bench.actions(), [Action::Lost { control: page(1) }, answer]);
    let wait = Command::Submit(Submission::Wait { blob: 0, offset: 0, value: 1 });
    assert_eq!(bench.send(1, wait), Some(Answer::Ok), "the word will never change");
    assert!(!bench.core.programs(|_| None)[0].is_served);
    assert_eq!(bench.send(0, Command::Unref { resource: 1 }), Some(Answer::Ok));
}

#[test]
fn malformed_submission_kills_the_worker_of_its_context_only() {
    let mut bench = Bench::new();
    bench.program(1, 1);
    bench.program(2, 2);
    bench.actions();
    assert_eq!(bench.send(1, Command::Submit(Submission::Malformed)), Some(Answer::Ok));
    let actions = bench.actions();
    assert_eq!(actions, [Action::Kill { worker: WorkerId(1) }, Action::Lost { control: page(1) }]);
    let outside = Submission::Wait { blob: 0, offset: PAGE_BYTES, value: 1 };
    assert_eq!(bench.send(2, Command::Submit(outside)), Some(Answer::Ok));
    assert_eq!(bench.actions()[0], Action::Kill { worker: WorkerId(2) });
}

#[test]
fn reset_forgets_commands_and_kills_all_workers() {
    let mut bench = Bench::new();
    bench.program(1, 1);
    bench.program(2, 2);
    bench.send(1, Command::Submit(Submission::Wait { blob: 0, offset: 0, value: 1 }));
    bench.send(0, Command::Unref { resource: 2 });
    bench.actions();
    bench.core.reset();
    assert_eq!(bench.actions(), [1, 2].map(|id| Action::Kill { worker: WorkerId(id) }));
    bench.core.removed(WorkerId(2), 0, 2);
    bench.core.exited(WorkerId(1));
    assert!(!bench.core.is_quiet());
    bench.core.exited(WorkerId(2));
    assert!(bench.core.is_quiet());
    assert_eq!(bench.actions(), []);
}

#[test]
fn blob_number_used_again_is_removed_in_order() {
    let mut bench = Bench::new();
    bench.program(1, 1);
    bench.send(0, Command::Unref { resource: 1 });
    let first = Ticket(bench.tickets);
    bench.send(1, Command::CreateBlob { resource: 2, blob: 1, size: PAGE_BYTES });
    assert_eq!(bench.send(0, Command::MapBlob { resource: 2, offset: 0 }), Some(Answer::Mapped));
    assert_eq!(bench.send(0, Command::Unref { resource: 2 }), None);
    let second = Ticket(bench.tickets);
    bench.actions();
    // A worker's response with an unknown serial number frees nothing.
    bench.core.removed(WorkerId(1), 0, 3);
    assert_eq!(bench.actions(), []);
    for (serial, ticket, range) in [(1, first, page(1)), (2, second, page(0))] {
        bench.core.removed(WorkerId(1), 0, serial);
        assert_eq!(bench.actions(), [Action::Zero { range }, Action::Answer { ticket, answer: Answer::Ok }]);
    }
}

/// Checks the actions of random steps.
#[derive(Default)]
struct Audit {
    outstanding: BTreeSet<Ticket>,
    /// Ranges that each worker has registered, with their blob numbers, oldest first.
    known: BTreeMap<WorkerId, Vec<(u32, Range)>>,
    zeroed: Option<Range>,
}

impl Audit {
    fn check(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Start { worker } => assert!(self.known.insert(worker, Vec::new()).is_none(), "used twice"),
                Action::Blob { worker, blob, range, .. } => {
                    let Range { offset, size } = range;
                    assert!(size != 0 && offset + size <= WINDOW && (offset | size).is_multiple_of(PAGE_BYTES));
                    assert_eq!(self.zeroed, Some(range), "a new blob must be zeroed");
                    let used = self.known.values().flatten().map(|(_, range)| *range);
                    assert!(used.into_iter().all(|it| it.offset + it.size <= offset || offset + size <= it.offset));
                    self.known.get_mut(&worker).expect("it was started").push((blob, range));
                }
                Action::Zero { range } => {
                    self.zeroed = Some(range);
                    let in_use = self.known.values().flatten().any(|(_, it)| *it == range);
                    assert!(!in_use, "zeroed while a worker uses the range");
                }
                Action::Answer { ticket, .. } => assert!(self.outstanding.remove(&ticket), "answered twice"),
                Action::Remove { worker, .. }
                | Action::Doorbell { worker }
                | Action::Leave { worker }
                | Action::Kill { worker } => assert!(self.known.contains_key(&worker)),
                Action::Lost { .. } => {}
            }
        }
    }
}

/// Returns the state as restored by the next process.
fn continued(core: &Core, outstanding: &BTreeSet<Ticket>) -> Core {
    let saved = core.save();
    let mut next = Core::restored(core.limits, saved.clone()).expect("a saved state is valid");
    assert_eq!(next.save(), saved);
    for &ticket in outstanding {
        let found = core.contexts.keys().find_map(|&id| Some((id, core.wait(id, ticket)?)));
        match found {
            Some((context, wait)) => assert!(next.restore_wait(context, ticket, wait), "{wait:?}"),
            None => assert!(next.awaits_removal(ticket), "an outstanding command waits for something"),
        }
    }
    let process = |id: WorkerId| u32::try_from(id.0).ok();
    assert_eq!(next.programs(process), core.programs(process));
    next
}

fn audited(steps: Vec<Step>) {
    let mut core = Core::new(Limits { window_bytes: WINDOW, workers: 4 });
    let memory = Memory::default();
    let mut audit = Audit::default();
    for (step, number) in steps.into_iter().zip(1..) {
        let ticket = Ticket(number);
        match step {
            Step::Command { context, command } => {
                audit.outstanding.insert(ticket);
                let answer = core.command(&fuzz::header(context), command, ticket, &memory, number);
                audit.check(core.take_actions());
                if answer.is_some() {
                    assert!(audit.outstanding.remove(&ticket), "answered twice");
                }
            }
            Step::Store { word, value } => {
                memory.0.borrow_mut().insert(u64::from(word) * 8, value);
                core.check_all(&memory);
            }
            Step::Removed { worker, blob } => {
                let known = audit.known.get_mut(&worker);
                if let Some(known) = known
                    && let Some(place) = known.iter().position(|(number, _)| *number == blob)
                    && core.workers.get(&worker).is_some_and(|it| it.removing.iter().any(|it| it.blob == blob))
                {
                    known.remove(place);
                }
                let serial = core.removing_serial(worker, blob);
                core.removed(worker, blob, serial);
            }
            Step::Exited { worker } => {
                audit.known.entry(worker).and_modify(Vec::clear);
                core.exited(worker);
            }
            Step::Tick { seconds } => {
                core.tick(number + u64::from(seconds) * 1_000_000_000);
                audit.check(core.take_actions());
                core = continued(&core, &audit.outstanding);
            }
            Step::Reset => {
                core.reset();
                audit.outstanding.clear();
                audit.check(core.take_actions());
                let workers: Vec<_> = core.workers.keys().copied().collect();
                for worker in workers {
                    audit.known.entry(worker).and_modify(Vec::clear);
                    core.exited(worker);
                }
                assert!(core.is_quiet());
            }
        }
        audit.check(core.take_actions());
        assert!(core.workers.len() <= 4);
    }
    // At the end, the guest destroys everything. Then, each command must have a response.
    let (contexts, resources) = (core.contexts.keys().copied(), core.resources.keys().copied());
    let ends = contexts.map(|context| (context, Command::DestroyContext));
    let ends: Vec<_> = ends.chain(resources.map(|resource| (0, Command::Unref { resource }))).collect();
    for ((context, command), number) in ends.into_iter().zip(1_000_000..) {
        let _ = core.command(&fuzz::header(context), command, Ticket(number), &memory, 0);
    }
    let workers: Vec<_> = core.workers.keys().copied().collect();
    workers.into_iter().for_each(|worker| core.exited(worker));
    for action in core.take_actions() {
        if let Action::Answer { ticket, .. } = action {
            audit.outstanding.remove(&ticket);
        }
    }
    assert_eq!(audit.outstanding, BTreeSet::new());
    assert!(core.is_quiet() && core.resources.is_empty() && !core.has_waits());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_commands_keep_ranges_tickets_and_workers(input in prop::collection::vec(any::<u8>(), 0..600)) {
        audited(fuzz::steps(&input));
    }
}
