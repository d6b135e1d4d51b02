//! The threads that call the driver.

use super::{Note, Notes};
use crate::core::{BatchId, Event, PieceId, SessionId};
use owner_driver::{DriverError, FetchTimes, Memory, New, Queue, Vault};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vram::TenantId;

/// Maximum number of pieces released between two readings of the card's free memory.
const GIVEN_UP_TOGETHER: usize = 64;
/// Maximum number of card pieces zeroed per wait. Zeroing a piece takes less time than waiting for the card.
const MAX_ZEROED_PER_WAIT: usize = 16;

/// A worker's task.
#[derive(Debug)]
enum Job {
    Make(New),
    Import(PieceId),
    /// Releases a piece. Contains the tenant that released it, if any, and true if the tenant had reported the release.
    Drop(PieceId, Option<(TenantId, bool)>),
    Copy(BatchId, Vec<(PieceId, PieceId)>, Queue),
}

/// Maximum number of processes that the driver suspends concurrently.
const SUSPENDING_MOST: usize = 16;
/// Maximum number of processes that the driver moves to this card concurrently.
const FETCHING_MOST: usize = 16;
/// Time limit for unfinished moves of processes when the owner exits. A process whose move is then unfinished stays
/// suspended until the next owner handles it.
// TIMEOUT: the daemon waits for the same time when it stops an owner.
const FETCHES_END: Duration = Duration::from_secs(2);

/// The workers. On drop, each worker completes its orders and exits. Dropping does not wait for suspensions, because
/// the driver waits indefinitely for a stopped process. It does wait for moves of processes, but at most for
/// [`FETCHES_END`].
pub(super) struct Workers {
    card: Option<Sender<Job>>,
    host: Option<Sender<Job>>,
    out: Option<Sender<Job>>,
    inward: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    vault: Arc<Vault>,
    notes: Notes,
    suspending: Arc<AtomicUsize>,
    fetching: Arc<AtomicUsize>,
}

impl Workers {
    pub(super) fn start(vault: &Arc<Vault>, notes: &Notes) -> io::Result<Self> {
        let mut threads = Vec::new();
        let mut worker = |name: &str| -> io::Result<Option<Sender<Job>>> {
            let (sender, receiver) = channel();
            let (vault, notes) = (Arc::clone(vault), notes.clone());
            let body = move || work(&vault, &notes, &receiver);
            threads.push(std::thread::Builder::new().name(name.into()).spawn(body)?);
            Ok(Some(sender))
        };
        let (card, host) = (worker("cuda-card")?, worker("cuda-host")?);
        let (out, inward) = (worker("cuda-out")?, worker("cuda-in")?);
        let (vault, notes, suspending, fetching) = (Arc::clone(vault), notes.clone(), Arc::default(), Arc::default());
        Ok(Self { card, host, out, inward, threads, vault, notes, suspending, fetching })
    }

    pub(super) fn make(&self, new: New) {
        self.vault.order(new.piece);
        put(self.maker(new.memory), Job::Make(new));
    }

    pub(super) fn import(&self, piece: PieceId) {
        put(&self.card, Job::Import(piece));
    }

    /// Releases a piece after the earlier orders for the same memory.
    pub(super) fn drop_piece(&self, piece: PieceId, memory: Option<Memory>, by: Option<(TenantId, bool)>) {
        self.vault.cancel(piece);
        match memory {
            Some(memory) => put(self.maker(memory), Job::Drop(piece, by)),
            // Either worker may be allocating the piece. The other one ignores this order.
            None => {
                put(&self.card, Job::Drop(piece, None));
                put(&self.host, Job::Drop(piece, None));
            }
        }
    }

    pub(super) fn copy(&self, batch: BatchId, pieces: Vec<(PieceId, PieceId)>, to: Memory) {
        match to {
            Memory::Host => put(&self.out, Job::Copy(batch, pieces, Queue::Out)),
            Memory::Device => put(&self.inward, Job::Copy(batch, pieces, Queue::In)),
        }
    }

    /// Makes the driver suspend a process.
    pub(super) fn suspend(&self, session: SessionId, pid: u32) {
        let report = move |done: Result<(), String>| {
            if let Err(error) = &done {
                tracing::warn!(pid, %error, "a program cannot be suspended");
            }
            Event::Suspended { session, done: done.is_ok() }
        };
        self.call(&self.suspending, SUSPENDING_MOST, move |vault| vault.driver().suspend(pid), report);
    }

    /// Makes the driver move a process to this card from the card with the UUID `from`.
    pub(super) fn fetch(&self, session: SessionId, pid: u32, from: [u8; 16], sees: Vec<[u8; 16]>) {
        let report = move |done: Result<FetchTimes, String>| Event::Fetched { session, done };
        self.call(&self.fetching, FETCHING_MOST, move |vault| vault.driver().fetch(pid, from, &sees), report);
    }

    /// Calls the driver on a separate thread, so that a hung call does not delay others. `report` receives the result
    /// or the reason why the driver was not called.
    fn call<T>(
        &self,
        running: &Arc<AtomicUsize>,
        most: usize,
        call: impl FnOnce(&Vault) -> Result<T, DriverError> + Send + 'static,
        report: impl FnOnce(Result<T, String>) -> Event + Copy + Send + 'static,
    ) {
        let (vault, notes) = (Arc::clone(&self.vault), self.notes.clone());
        if running.fetch_add(1, Ordering::SeqCst) >= most {
            running.fetch_sub(1, Ordering::SeqCst);
            let why = format!("the driver already works on {most} programs");
            return self.notes.put(Note::Event(report(Err(why))));
        }
        let count = Arc::clone(running);
        let body = move || {
            let done = call(&vault).map_err(|error| error.to_string());
            count.fetch_sub(1, Ordering::SeqCst);
            notes.put(Note::Event(report(done)));
        };
        if let Err(error) = std::thread::Builder::new().name("cuda-suspend".into()).spawn(body) {
            running.fetch_sub(1, Ordering::SeqCst);
            self.notes.put(Note::Event(report(Err(format!("no thread for the call: {error}")))));
        }
    }

    fn maker(&self, memory: Memory) -> &Option<Sender<Job>> {
        match memory {
            Memory::Device => &self.card,
            Memory::Host => &self.host,
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        (self.card, self.host, self.out, self.inward) = (None, None, None, None);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        let ended = Instant::now();
        while self.fetching.load(Ordering::SeqCst) > 0 && ended.elapsed() < FETCHES_END {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn put(worker: &Option<Sender<Job>>, job: Job) {
    if let Some(worker) = worker {
        // Ignore errors: a worker exits only when all workers are being dropped.
        let _ = worker.send(job);
    }
}

fn work(vault: &Vault, notes: &Notes, jobs: &Receiver<Job>) {
    let mut next = None;
    while let Some(job) = next.take().or_else(|| jobs.recv().ok()) {
        let event = match job {
            Job::Make(first) => {
                let mut together = vec![first];
                while next.is_none() && first.is_quick() && together.len() < MAX_ZEROED_PER_WAIT {
                    match jobs.try_recv() {
                        Ok(Job::Make(new)) if new.zeroed == first.zeroed => together.push(new),
                        Ok(other) => next = Some(other),
                        Err(_) => break,
                    }
                }
                // Skip pieces that were released before their allocation began.
                together.retain(|new| vault.begins(new.piece));
                for (New { piece, memory, .. }, made) in vault.make(together) {
                    if let Err(error) = &made {
                        note_lost(error, notes);
                        notes.put(Note::Failed(piece, format!("{memory:?}: {error}")));
                    }
                    notes.put(Note::Event(Event::Made { piece, memory: made.is_ok().then_some(memory) }));
                }
                continue;
            }
            Job::Import(piece) => {
                let memory = vault.import(piece);
                if let Err(error) = &memory {
                    notes.put(Note::Failed(piece, format!("a program's chunk cannot be adopted: {error}")));
                }
                Event::Made { piece, memory: memory.ok() }
            }
            Job::Drop(piece, None) => {
                vault.drop_piece(piece);
                continue;
            }
            Job::Drop(first, Some(by)) => {
                let mut together = vec![first];
                while next.is_none() && together.len() < GIVEN_UP_TOGETHER {
                    match jobs.try_recv() {
                        Ok(Job::Drop(piece, Some(other))) if other == by => together.push(piece),
                        Ok(other) => next = Some(other),
                        Err(_) => break,
                    }
                }
                let (tenant, sure) = by;
                match vault.give_up(&together) {
                    0 => continue,
                    bytes => Event::Missing { tenant, sure, bytes },
                }
            }
            Job::Copy(batch, pieces, queue) => {
                let start = Instant::now();
                let done = vault.copy(queue, &pieces);
                if let Err(error) = &done {
                    note_lost(error, notes);
                    tracing::error!(%error, "chunks cannot be copied");
                }
                Event::Copied { batch, done: done.is_ok(), ns: start.elapsed().as_nanos() as u64 }
            }
        };
        notes.put(Note::Event(event));
    }
}

/// Stops the owner if the card was lost.
fn note_lost(error: &DriverError, notes: &Notes) {
    if error.is_card_lost() {
        notes.put(Note::CardLost(error.to_string()));
    }
}
