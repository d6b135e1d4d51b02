//! A daemon that runs as a service, with VMs whose programs use CUDA. The test acts as the guest's driver and program.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Child;

use cuda_calls::own::{self, Route, flags};
use cuda_calls::{CALLS, Kind, handle};
use cuda_ring::{BlobKind, Header, PINNED_ADDRESSES, control, ring, slots, state};
use rig::service_manager::ServiceManager;
use rustix::process::{Pid, test_kill_process};

use super::daemon::{card, json, owner_pids, tenant};
use super::virtio::{Driver, LIMIT, blob, context, doorbell, map, until};
use super::{Rig, built};

/// Offsets of a program's blobs from its base in the window (`base`).
pub const CONTROL: u64 = 0;
pub const RING: u64 = 16 << 20;
pub const PINNED: u64 = 32 << 20;
pub const PINNED_BYTES: u64 = 1 << 20;

/// A daemon that runs as a service, and its folder.
pub struct Service {
    pub rig: Rig,
    pub manager: ServiceManager,
    pub daemon: Child,
}

impl Service {
    /// Starts a daemon with a VM and a tenant on one card.
    pub fn start(orphan_timeout_s: u64) -> Self {
        Self::start_with(orphan_timeout_s, "")
    }

    /// Starts a daemon as [`Self::start`] does, with additional configuration keys for the card.
    pub fn start_with(orphan_timeout_s: u64, keys: &str) -> Self {
        Self::with(1, |rig| {
            let worker = worker(rig, 1);
            let more = format!("cuda.worker = {worker:?}\ncuda.orphan_timeout_s = {orphan_timeout_s}\n{keys}");
            let vm = "[[vm]]\nname = \"vm\"\ncard = \"fake\"\nvram_mib = 32\ncuda = { window_mib = 1024 }\n";
            with_window(&card(rig, "fake", &more)) + &tenant("a", "fake", "") + vm
        })
    }

    /// Starts a daemon with these configuration tables, on a machine with `cards` cards.
    pub fn with(cards: u64, tables: impl FnOnce(&Rig) -> String) -> Self {
        let mut rig = super::daemon::rig(tables);
        rig.cards = cards;
        let manager = ServiceManager::new(&rig.folder.path().join("notify")).expect("a service manager");
        let daemon = spawn(&rig, &manager);
        Self { rig, manager, daemon }
    }

    pub fn driver(&self) -> Driver {
        Driver::new(&self.rig.folder.path().join("vm.sock"))
    }

    /// Kills the daemon.
    pub fn kill(&mut self) {
        self.daemon.kill().expect("killed");
        self.daemon.wait().expect("ended");
    }

    pub fn restart(&mut self) {
        self.daemon = spawn(&self.rig, &self.manager);
    }

    /// Upgrades the daemon. Returns the next daemon's process ID.
    pub fn upgrade(&mut self) -> i32 {
        let info = json(&self.rig, &["daemon", "upgrade"]);
        assert!(self.daemon.wait().expect("ended").success());
        i32::try_from(info["pid"].as_i64().expect("a number")).expect("a process")
    }

    /// Waits until the service manager has stored the function's journal and all descriptors that it refers to.
    pub fn until_kept(&self) {
        let whole = |names: &[String]| {
            let of_vmm = names.iter().filter(|name| name.starts_with("vmm/vm")).count();
            // The connection, its journal, memory, three interrupts, the window, and the function's journal.
            (of_vmm == 8).then_some(())
        };
        let kept = self
            .manager
            .wait(LIMIT, |heard| whole(&heard.kept.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()));
        kept.expect("all descriptors are stored");
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.rig.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// Adds the host memory of one window to a card's configuration.
pub fn with_window(card: &str) -> String {
    card.replace("memory.host_mib = 128\n", "memory.host_mib = 1152\n")
}

pub fn spawn(rig: &Rig, manager: &ServiceManager) -> Child {
    let mut command = manager.command(&built("mediatord")).expect("a command");
    let fake = rig.command("true", "plain");
    command.envs(fake.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.arg("--config").arg(rig.folder.path().join("m.toml")).env("MEDIATORD_LOG", "info");
    let log = std::fs::File::options().create(true).append(true).open(rig.folder.path().join("log"));
    let child = command.stderr(log.expect("a file")).spawn().expect("starts");
    manager.wait(LIMIT, |heard| heard.take("READY=1")).expect("the function is ready");
    child
}

/// Writes a script that starts the worker with the fake cards in its environment.
pub fn worker(rig: &Rig, cards: u64) -> PathBuf {
    let path = rig.folder.path().join("worker");
    let card = rig.folder.path().join("card");
    let text = format!(
        "#!/bin/sh\nexport FAKE_CUDA_FOLDER={} FAKE_CUDA_MIB=512 FAKE_CUDA_CARDS={cards}\nexec {} \"$@\"\n",
        card.display(),
        built("cuda-worker").display()
    );
    std::fs::write(&path, text).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("set");
    path
}

/// Returns the offset of a program's blobs in the window.
fn base(id: u32) -> u64 {
    u64::from(id - 1) << 26
}

/// Starts a program with a pinned blob, and waits until its worker serves it.
pub fn begin(driver: &mut Driver, id: u32) {
    let base = base(id);
    driver.execute(&context(id));
    for (number, kind, at, bytes) in [
        (0, BlobKind::Control, CONTROL, control::BYTES),
        (1, BlobKind::Ring, RING, ring::BYTES),
        (2, BlobKind::Pinned, PINNED, PINNED_BYTES),
    ] {
        let resource = id * 16 + number;
        driver.execute(&blob(id, resource, (number, kind.number()), bytes));
        driver.execute(&map(resource, base + at));
        if kind == BlobKind::Control {
            driver.store(base + control::VERSION, cuda_ring::VERSION);
        }
    }
    until("the worker is ready", || driver.load(base + control::STATE) == state::READY);
}

/// Returns the process IDs of a rig's workers.
pub fn workers(rig: &Rig) -> Vec<i32> {
    let named = rig.folder.path().join("card").display().to_string();
    let is_ours = |process: &std::fs::DirEntry| {
        let of = |file: &str| std::fs::read(process.path().join(file)).unwrap_or_default();
        let name = of("comm");
        // A worker whose program has started has the program's guest process ID in its name.
        let is_worker = name.starts_with(b"cuda-worker") || name.starts_with(b"guest ");
        is_worker && String::from_utf8_lossy(&of("environ")).contains(&named)
    };
    let processes = std::fs::read_dir("/proc").expect("readable").flatten().filter(is_ours);
    processes.filter_map(|process| process.file_name().to_str()?.parse().ok()).collect()
}

pub fn is_alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    test_kill_process(Pid::from_raw(pid).expect("a process")).is_ok() && !stat.contains(") Z ")
}

/// Returns the owner's process ID.
pub fn owner_of(service: &Service) -> i32 {
    *owner_pids(service.daemon.id()).first().expect("an owner")
}

/// A program's ring. Each message requests a reply.
pub struct Calls {
    program: u32,
    head: u64,
    count: u64,
    context: u32,
}

/// Slot of the program's only thread.
const SLOT: u16 = 1;

impl Calls {
    /// Sends a message, and returns the result and the first word of its reply.
    pub fn send(&mut self, driver: &mut Driver, op: u16, words: &[u64]) -> (i32, u64) {
        let base = base(self.program);
        let header = Header { op, flags: flags::ANSWER, words: words.len() as u32 + 2 };
        let route = Route { context: self.context, slot: SLOT, capture_mode: 0 };
        for word in [header.word(), route.word()].iter().chain(words) {
            driver.store(base + RING + self.head, *word);
            self.head += 8;
        }
        driver.store(base + CONTROL + control::HEAD, self.head);
        driver.execute(&doorbell(self.program));
        self.count += 1;
        until("a reply", || driver.load(base + CONTROL + slots::sequence(SLOT)) == self.count || self.is_lost(driver));
        assert!(!self.is_lost(driver), "the program has no worker");
        (driver.load(base + CONTROL + slots::result(SLOT)) as i32, driver.load(base + CONTROL + slots::data(SLOT)))
    }

    /// Returns true if the program has lost its worker.
    pub fn is_lost(&self, driver: &Driver) -> bool {
        driver.load(base(self.program) + CONTROL + control::STATE) == state::LOST
    }

    /// Executes a call that must succeed. Returns the first word of its results.
    pub fn call(&mut self, driver: &mut Driver, name: &str, words: &[u64]) -> u64 {
        let op = CALLS.iter().position(|call| call.name == name).expect("described");
        let (code, result) = self.send(driver, u16::try_from(op).expect("small"), words);
        assert_eq!(code, 0, "{name}");
        result
    }

    /// Starts the first program with memory that contains a word. Returns the program's calls and the address.
    pub fn start(driver: &mut Driver, word: u64) -> (Self, u64) {
        Self::start_with(driver, 1, 4096, word)
    }

    /// Starts a program with memory that contains a word. Returns the program's calls and the address.
    pub fn start_with(driver: &mut Driver, program: u32, bytes: u64, word: u64) -> (Self, u64) {
        let mut calls = Self { program, head: 0, count: 0, context: 0 };
        let words = [cuda_ring::VERSION, CALLS.len() as u64, 4242];
        assert_eq!(calls.send(driver, own::START, &words).0, 0);
        calls.call(driver, "cuInit", &[0]);
        calls.call(driver, "cuDevicePrimaryCtxRetain+", &[handle(Kind::Context, 1), 0]);
        calls.context = 1;
        assert_eq!(calls.send(driver, own::PIN, &[2, PINNED_ADDRESSES]).0, 0);
        let address = calls.call(driver, "cuMemAlloc_v2+", &[bytes]);
        assert_eq!(calls.send(driver, own::COPY_INLINE, &[address, 8, 0, word]).0, 0);
        (calls, address)
    }

    /// Copies a word from card memory to pinned memory, and checks the word's value.
    pub fn check(&mut self, driver: &mut Driver, address: u64, word: u64) {
        let place = base(self.program) + PINNED + 8;
        driver.store(place, 0);
        self.call(driver, "cuMemcpyAsync+", &[PINNED_ADDRESSES + 8, address, 8, 0]);
        assert_eq!(self.send(driver, own::WAIT_STREAM, &[0]).0, 0);
        assert_eq!(driver.load(place), word);
    }
}
