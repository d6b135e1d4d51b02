//! Tests rings and sleeping under thousands of schedules chosen by a checker, with simulated store buffers. A thread
//! sees its own stores immediately, but other threads are guaranteed to see them only after a fence. If a side sleeps
//! forever, the checker reports a deadlock.

use std::cell::RefCell;
use std::collections::VecDeque;

use locks::checked::try_schedules;
use shuttle::rand::{Rng as _, thread_rng};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

use crate::layout::control;
use crate::{Broken, Consumer, Geometry, Header, Producer, Words, sleep, slots};

const SCHEDULES: usize = 2000;
const MESSAGES: u64 = 6;
/// A ring of eight words, which is often full.
const SMALL: Geometry = Geometry { head: control::HEAD, tail: control::TAIL, base: RING, bytes: 64 };
/// Offset of the ring. It is in the same memory as the slots, so that one store buffer preserves the order of all
/// stores.
const RING: u64 = control::SLOTS + control::SLOT_BYTES;

/// The memory that the store buffers drain into.
type Memory = Arc<Mutex<Vec<u64>>>;

/// One thread's view of the memory.
struct View {
    memory: Memory,
    /// Stores that are not yet visible to other threads, oldest first.
    buffer: RefCell<VecDeque<(u64, u64)>>,
}

impl View {
    fn new(memory: &Memory) -> Self {
        Self { memory: Arc::clone(memory), buffer: RefCell::default() }
    }

    /// Makes all stores visible, or a number of the oldest stores chosen by the schedule.
    fn drain(&self, all: bool) {
        while all || thread_rng().gen_bool(0.3) {
            let Some((offset, value)) = self.buffer.borrow_mut().pop_front() else { break };
            self.memory.lock().expect("no panic")[offset as usize / 8] = value;
        }
    }
}

impl Words for &View {
    fn load(&self, offset: u64) -> u64 {
        self.drain(false);
        let own = self.buffer.borrow().iter().rev().find(|(at, _)| *at == offset).map(|(_, value)| *value);
        own.unwrap_or_else(|| self.memory.lock().expect("no panic")[offset as usize / 8])
    }

    fn store(&self, offset: u64, value: u64) {
        self.buffer.borrow_mut().push_back((offset, value));
        self.drain(false);
    }

    fn add(&self, offset: u64, value: u64) -> u64 {
        self.drain(true);
        let mut memory = self.memory.lock().expect("no panic");
        memory[offset as usize / 8] = memory[offset as usize / 8].wrapping_add(value);
        memory[offset as usize / 8]
    }

    fn fence(&self) {
        self.drain(true);
    }
}

/// A wake-up that stays pending until the sleeper consumes it.
#[derive(Default)]
struct Wake(Mutex<bool>, Condvar);

impl Wake {
    fn ring(&self) {
        *self.0.lock().expect("no panic") = true;
        self.1.notify_one();
    }

    fn sleep(&self, view: &View) {
        // Stores become visible eventually, even if the thread sleeps.
        view.drain(true);
        let mut rung = self.0.lock().expect("no panic");
        while !*rung {
            rung = self.1.wait(rung).expect("no panic");
        }
        *rung = false;
    }
}

/// The state shared by both sides.
struct Rig {
    memory: Memory,
    doorbell: Wake,
    check: Wake,
}

impl Rig {
    fn new() -> Arc<Self> {
        let memory = Arc::new(Mutex::new(vec![0; (RING + SMALL.bytes) as usize / 8]));
        Arc::new(Self { memory, doorbell: Wake::default(), check: Wake::default() })
    }

    /// Runs the worker, which reads all messages and replies to the last one.
    fn work(&self) {
        let control = View::new(&self.memory);
        let mut consumer = Consumer::new(&control, &control, SMALL);
        let (mut message, mut expected) = (Vec::new(), 0);
        while expected < MESSAGES {
            if consumer.next(&mut message).expect("an honest ring") {
                assert_eq!(message[1], expected, "messages in order");
                assert!(message[1..].iter().all(|word| *word == expected), "whole messages");
                expected += 1;
                if sleep::must_notify(&&control) {
                    self.check.ring();
                }
                continue;
            }
            sleep::announce_sleep(&&control);
            if !consumer.has_messages() {
                self.doorbell.sleep(&control);
            }
            sleep::awake(&&control);
        }
        slots::answer(&&control, 0, 1, 7, 0);
        if sleep::must_notify(&&control) {
            self.check.ring();
        }
        control.drain(true);
    }

    /// Runs the guest, which sends messages of a header and one to three words, and then waits for a reply.
    fn send(&self) {
        let control = View::new(&self.memory);
        let mut producer = Producer::new(&control, &control, SMALL);
        for number in 0..MESSAGES {
            let words = 2 + (number % 3) as usize;
            let mut message = vec![number; words];
            message[0] = Header { op: 1, flags: 0, words: words as u32 }.word();
            loop {
                match producer.publish(&message) {
                    Ok(true) => break self.doorbell.ring(),
                    Ok(false) => break,
                    Err(crate::Full(position)) => self.wait(&control, SMALL.tail, position),
                }
            }
        }
        self.wait(&control, slots::sequence(0), 1);
        assert_eq!((&control).load(slots::result(0)), 7);
    }

    fn wait(&self, control: &View, offset: u64, value: u64) {
        sleep::wait(&control, offset, value, || {
            self.check.sleep(control);
            true
        });
    }
}

#[test]
fn sleep_protocol_loses_no_wakeup_in_any_schedule() {
    try_schedules(SCHEDULES, || {
        let rig = Rig::new();
        let worker = Arc::clone(&rig);
        let worker = thread::spawn(move || worker.work());
        rig.send();
        worker.join().expect("the worker ends");
    });
}

#[test]
fn consumer_refuses_positions_and_headers_out_of_range() {
    try_schedules(1, || {
        let header = |words| Header { op: 1, flags: 0, words }.word();
        for (head, first) in [(72, header(1)), (4, header(1)), (8, header(0)), (8, header(2)), (64, header(9))] {
            let rig = Rig::new();
            rig.memory.lock().expect("no panic")[SMALL.head as usize / 8] = head;
            rig.memory.lock().expect("no panic")[RING as usize / 8] = first;
            let control = View::new(&rig.memory);
            let result = Consumer::new(&control, &control, SMALL).next(&mut Vec::new());
            assert_eq!(result, Err(Broken), "head {head}");
        }
    });
}
