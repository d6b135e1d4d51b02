//! Tests the threads over a real socket with a driver model. Programs are threads of this process that act like the
//! shim and access their chunks through the descriptors.

use super::*;
use crate::core::{OnStuck, TenantSpec};
use cuda_protocol::{Adopted, Chunk, ChunkId, FromTenant, Hello, Link, Usage, VERSION};
use owner_driver::{Memory, Model};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

const CHUNK: u64 = 2 << 20;

fn config(card: u64) -> CardConfig {
    CardConfig {
        host_bytes: 32 * CHUNK,
        chunk_bytes: CHUNK,
        host_ready_bytes: 2 * CHUNK,
        // In these tests, tenants share the memory by chunks, without quanta.
        quanta: vram::QuantaConfig { mode: vram::Mode::Off, ..vram::QuantaConfig::default() },
        ..CardConfig::new(card * CHUNK)
    }
}

fn start(driver: &Arc<Model>, card: u64, folder: &Path) -> Server {
    let driver: Arc<dyn Driver> = Arc::clone(driver) as Arc<dyn Driver>;
    let journal = folder.join("journal");
    let server = Server::start(config(card), driver, &folder.join("cuda.sock"), Some(&journal)).expect("it starts");
    for name in ["one", "two"] {
        let spec = TenantSpec {
            name: name.into(),
            uid: None,
            memory_bytes: 32 * CHUNK,
            window_bytes: 0,
            limits: vram::Limits::default(),
            time: sched::VgpuParams::default(),
            on_stuck: OnStuck::Kill,
            share_group: None,
            gang: None,
        };
        server.call(move |core| core.add_tenant(spec)).expect("it serves").expect("the request is valid");
    }
    server
}

/// A program's chunks, each with its place and the file that is mapped for it.
type Chunks = BTreeMap<ChunkId, (cuda_protocol::Place, File)>;

/// A program whose shim replies to orders on a separate thread.
struct Program {
    link: Arc<Link>,
    chunks: Arc<Mutex<Chunks>>,
    runs: Arc<std::sync::atomic::AtomicU32>,
    thread: Option<JoinHandle<()>>,
}

impl Program {
    fn connect(socket: &Path, tenant: &str, adopts: Option<Chunks>) -> Self {
        let link = Arc::new(Link::connect(socket).expect("it listens"));
        let (tenant, program) = (tenant.to_owned(), "test".to_owned());
        let hello = Hello { version: VERSION, pid: 1, instance: 5, tenant, program, adopts: adopts.is_some() };
        link.send(&FromTenant::Hello(hello), &[]).expect("sent");
        let welcome = link.receive().expect("an answer").message;
        assert!(matches!(welcome, FromOwner::Welcome(_)), "{welcome:?}");
        if let Some(chunks) = &adopts {
            let adopted =
                |(id, (place, _)): (&ChunkId, &(_, _))| Adopted { card: 0, id: *id, place: *place, descriptor: true };
            let descriptors: Vec<_> = chunks.values().map(|(_, file)| file.as_fd()).collect();
            let message = FromTenant::Adopt { chunks: chunks.iter().map(adopted).collect(), more: false };
            link.send(&message, &descriptors).expect("sent");
        }
        let chunks = Arc::new(Mutex::new(adopts.unwrap_or_default()));
        let runs = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let body = (Arc::clone(&link), Arc::clone(&chunks), Arc::clone(&runs));
        let thread = std::thread::spawn(move || listen(&body.0, &body.1, &body.2));
        Self { link, chunks, runs, thread: Some(thread) }
    }

    fn say(&self, message: FromTenant) {
        self.link.send(&message, &[]).expect("sent");
    }

    fn count(&self) -> usize {
        self.chunks.lock().expect("whole").len()
    }

    fn write(&self, value: u8) {
        for (_, file) in self.chunks.lock().expect("whole").values() {
            file.write_all_at(&[value; 4096], CHUNK - 4096).expect("written");
        }
    }

    fn holds(&self, value: u8) -> bool {
        let chunks = self.chunks.lock().expect("whole");
        chunks.values().all(|(_, file)| {
            let mut data = [0; 4096];
            file.read_exact_at(&mut data, CHUNK - 4096).expect("read");
            data == [value; 4096]
        })
    }

    fn in_host(&self) -> usize {
        self.chunks.lock().expect("whole").values().filter(|(place, _)| *place == cuda_protocol::Place::Host).count()
    }

    /// Closes the program's connection, and returns its chunks.
    fn leave(mut self) -> Chunks {
        rustix::net::shutdown(&*self.link, rustix::net::Shutdown::Both).expect("shut down");
        self.thread.take().expect("once").join().expect("no panic");
        std::mem::take(&mut *self.chunks.lock().expect("whole"))
    }
}

fn listen(link: &Link, chunks: &Mutex<Chunks>, runs: &std::sync::atomic::AtomicU32) {
    while let Ok(received) = link.receive() {
        let files = received.descriptors.into_iter().map(File::from);
        let answer = match received.message {
            FromOwner::Granted { chunks: new, .. } => {
                let named = new.into_iter().zip(files).map(|(Chunk { id, place }, file)| (id, (place, file)));
                chunks.lock().expect("whole").extend(named);
                None
            }
            FromOwner::Quiesce { order, .. } => Some(FromTenant::Quiet { order }),
            FromOwner::Reclaim { order } => Some(FromTenant::Reclaimed { order }),
            FromOwner::Redirect { order, moves } => {
                let moved = moves.len() as u32;
                let mut chunks = chunks.lock().expect("whole");
                for (Chunk { id, place }, file) in moves.into_iter().zip(files) {
                    chunks.insert(id, (place, file));
                }
                Some(FromTenant::Redirected { order, moved })
            }
            FromOwner::Run(_) => {
                runs.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                None
            }
            FromOwner::Stop { card, turn } => {
                Some(FromTenant::Stopped { card, turn, usage: Usage::default(), waiting: true })
            }
            _ => None,
        };
        if answer.is_some_and(|answer| link.send(&answer, &[]).is_err()) {
            return;
        }
    }
}

/// Waits until `done` returns true.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    // TIMEOUT: each condition takes less than a second on an idle host. A minute allows for busy hosts.
    let limit = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < limit, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn two_programs_share_undersized_card_and_leave_no_memory() {
    let (driver, folder) = (Arc::new(Model::new(64 * CHUNK)), tempfile::tempdir().expect("a folder"));
    let server = start(&driver, 8, folder.path());
    let one = Program::connect(server.socket(), "one", None);
    one.say(FromTenant::Allocate { request: 1, card: 0, chunks: 8 });
    until("the first program's chunks arrive", || one.count() == 8);
    assert!(one.holds(0), "new chunks are zeroed");
    one.write(1);
    one.say(FromTenant::Waiting { card: 0 });
    let two = Program::connect(server.socket(), "two", None);
    two.say(FromTenant::Waiting { card: 0 });
    two.say(FromTenant::Allocate { request: 1, card: 0, chunks: 8 });
    until("the second program's chunks arrive", || two.count() == 8);
    until("memory is shared", || one.in_host().abs_diff(4) <= 1 && two.in_host().abs_diff(4) <= 1);
    assert!(one.holds(1) && two.holds(0), "contents follow their chunks");
    until("both have turns", || [&one, &two].iter().all(|p| p.runs.load(std::sync::atomic::Ordering::Relaxed) > 2));
    let view = server.call(|core| core.view(0)).expect("it serves");
    assert!(view.relocations >= 3 && view.turns > 2, "{view:?}");
    drop(one.leave());
    drop(two.leave());
    until("the card's memory is free", || driver.handles(Memory::Device) == 0);
    drop(server);
}

#[test]
fn a_new_owner_takes_programs_over() {
    let (driver, folder) = (Arc::new(Model::new(64 * CHUNK)), tempfile::tempdir().expect("a folder"));
    let server = start(&driver, 8, folder.path());
    let one = Program::connect(server.socket(), "one", None);
    one.say(FromTenant::Allocate { request: 1, card: 0, chunks: 6 });
    until("chunks come", || one.count() == 6);
    one.write(7);
    drop(server);
    let kept = one.leave();
    assert_eq!(kept.len(), 6);
    let server = start(&driver, 8, folder.path());
    let one = Program::connect(server.socket(), "one", Some(kept));
    until("its chunks are adopted", || server.call(|core| core.view(0)).expect("it serves").memory.summary.free == 2);
    one.say(FromTenant::Allocate { request: 2, card: 0, chunks: 1 });
    until("the program gets another chunk", || one.count() == 7);
    let kept = one.leave();
    assert_eq!(
        kept.values()
            .filter(|(_, file)| {
                let mut byte = [0];
                file.read_exact_at(&mut byte, CHUNK - 1).expect("read");
                byte == [7]
            })
            .count(),
        6,
        "with their contents"
    );
    until("the card's memory is free", || driver.handles(Memory::Device) == 0);
}

#[test]
fn invalid_chunk_descriptors_end_only_their_connection() {
    let (driver, folder) = (Arc::new(Model::new(64 * CHUNK)), tempfile::tempdir().expect("a folder"));
    let server = start(&driver, 8, folder.path());
    let one = Program::connect(server.socket(), "one", None);
    one.say(FromTenant::Allocate { request: 1, card: 0, chunks: 2 });
    until("chunks come", || one.count() == 2);
    let odd = tempfile::tempfile().expect("a file");
    odd.set_len(12345).expect("sized");
    let short = tempfile::tempfile().expect("a file");
    short.set_len(CHUNK / 2).expect("sized");
    for (number, file) in [odd, short].into_iter().enumerate() {
        let chunks = BTreeMap::from([(ChunkId(number as u64), (cuda_protocol::Place::Device, file))]);
        let mut liar = Program::connect(server.socket(), "two", Some(chunks));
        liar.thread.take().expect("once").join().expect("its connection is closed");
    }
    assert!(one.holds(0));
    drop(one.leave());
    until("the card's memory is free", || driver.handles(Memory::Device) == 0);
}

fn hello(tenant: &str) -> FromTenant {
    let (tenant, program) = (tenant.to_owned(), "test".to_owned());
    FromTenant::Hello(Hello { version: VERSION, pid: 1, instance: 5, tenant, program, adopts: false })
}

#[test]
fn silent_connections_end_and_block_no_other_tenant() {
    let (driver, folder) = (Arc::new(Model::new(64 * CHUNK)), tempfile::tempdir().expect("a folder"));
    let mut server = start(&driver, 8, folder.path());
    // Each tenant has a separate socket, as under the daemon.
    let path = |name: &str| folder.path().join(name);
    for name in ["one", "two"] {
        let tenant = server.call(move |core| core.tenant(name)).expect("it serves").expect("there");
        server.listen(Some(tenant), &path(name), &Rights::default()).expect("it listens");
    }
    let silent: Vec<Link> = (0..300).filter_map(|_| Link::connect(&path("one")).ok()).collect();
    let two = Program::connect(&path("two"), "two", None);
    two.say(FromTenant::Allocate { request: 1, card: 0, chunks: 4 });
    until("the neighbour's chunks arrive", || two.count() == 4);
    let ended = |link: &Link| matches!(link.try_receive_from_owner(), Err(LinkError::Closed));
    until("the connections are closed without a message", || silent.iter().all(ended));
    let one = Program::connect(&path("one"), "one", None);
    one.say(FromTenant::Allocate { request: 1, card: 0, chunks: 1 });
    until("its own programs are served again", || one.count() == 1);
}

#[test]
fn program_that_reads_no_chunks_does_not_block_neighbour() {
    let (driver, folder) = (Arc::new(Model::new(64 * CHUNK)), tempfile::tempdir().expect("a folder"));
    let server = start(&driver, 32, folder.path());
    let two = Program::connect(server.socket(), "two", None);
    let deaf: Vec<Link> = (0..20).map(|_| Link::connect(server.socket()).expect("it listens")).collect();
    for link in &deaf {
        link.send(&hello("one"), &[]).expect("sent");
        assert!(matches!(link.receive().expect("an answer").message, FromOwner::Welcome(_)));
    }
    deaf[0].send(&FromTenant::Allocate { request: 1, card: 0, chunks: 16 }, &[]).expect("sent");
    let FromOwner::Granted { chunks, .. } = deaf[0].receive().expect("granted").message else { panic!("chunks") };
    let chunks = chunks.iter().map(|chunk| chunk.id).collect();
    deaf[0].send(&FromTenant::Export { request: 2, chunks }, &[]).expect("sent");
    let share = loop {
        if let FromOwner::Shared { share, .. } = deaf[0].receive().expect("a token").message {
            break share;
        }
    };
    // Without limits, 20 * 100 * 16 descriptors would be in transit, more than the kernel allows.
    for request in 0..100 {
        for link in &deaf {
            link.send(&FromTenant::Open { request, share }, &[]).expect("sent");
        }
    }
    for request in 0..50 {
        two.say(FromTenant::Allocate { request, card: 0, chunks: 1 });
        until("the neighbour's chunk arrives", || two.count() == 1);
        let chunks = two.chunks.lock().expect("whole").keys().copied().collect();
        two.chunks.lock().expect("whole").clear();
        two.say(FromTenant::Free { chunks });
    }
    // Once the programs read, they get all chunks that they have requested.
    let mut granted = vec![0; deaf.len()];
    until("all requested chunks arrive", || {
        for (link, granted) in deaf.iter().zip(&mut granted) {
            while let Ok(received) = link.try_receive_from_owner() {
                match received.message {
                    FromOwner::Granted { .. } => *granted += 1,
                    other => panic!("{other:?}"),
                }
            }
        }
        granted.iter().all(|granted| *granted == 100)
    });
}

#[test]
fn next_owner_continues_with_the_accounts() {
    let (driver, folder) = (Arc::new(Model::new(16 * CHUNK)), tempfile::tempdir().expect("a folder"));
    let clock = |server: &Server| server.call(|core| core.clock_ns()).expect("it serves");
    let first = start(&driver, 16, folder.path());
    // Each event advances the clock by at most 100 ms.
    first.call(|core| (0..6000).for_each(|step| core.handle(step * 100_000_000, Event::Tick))).expect("it serves");
    let before = clock(&first);
    assert!(before >= 500_000_000_000);
    drop(first);
    let second = start(&driver, 16, folder.path());
    assert!(clock(&second) >= before, "the clock of the accounts continues");
    drop(second);
    let path = folder.path().join("journal.accounts");
    let mut file = std::fs::read(&path).expect("the accounts");
    file.truncate(file.len() - 1);
    std::fs::write(&path, file).expect("written");
    let third = start(&driver, 16, folder.path());
    assert!(clock(&third) < before, "damaged accounts are not used");
}
