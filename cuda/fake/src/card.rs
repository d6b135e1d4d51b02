//! The cards. Each card is a folder that processes share.
//!
//! The memory usage that NVML reports per process follows observations of driver 580 on an H100. Each allocation is
//! charged once: to its creator while the creator has a handle or mapping of it, and otherwise to a process that has
//! imported it. Memory kept alive only by a descriptor is in use, but is not charged to any process. The same applies
//! to managed memory.
//!
//! The file `lost` in a card's folder simulates a reset after an uncorrectable memory error (Xid 48) or by an operator.
//! It contains the number of the last allocation before the reset. All allocations up to this number are lost, and all
//! later calls fail with `CUDA_ERROR_ECC_UNCORRECTABLE` in processes that had a context. Processes that start later are
//! not affected. While the file `broken` exists, the card rejects new contexts, like a card that still needs a reset.
//! The file `exit-waits` contains the name of a program whose exit handlers wait for a lost card.
//!
//! UNSAFETY: locks files, and registers an exit handler.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::ops::Deref;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use crate::engine::{self, Engine};

/// Environment variable with the path of the first card's folder, which need not exist. It contains the other cards'
/// folders.
const FOLDER: &str = "FAKE_CUDA_FOLDER";
/// Environment variable with the memory size of each card in MiB.
const MEMORY: &str = "FAKE_CUDA_MIB";
/// Environment variable with the number of cards.
const CARDS: &str = "FAKE_CUDA_CARDS";
/// Environment variable with the card memory per context, in MiB. NVIDIA's contexts use 518 MiB on an H100.
const CONTEXT: &str = "FAKE_CUDA_CONTEXT_MIB";
/// NVIDIA's environment variable for the visible cards, which `cuInit` reads.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Memory that backs an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// The card's memory.
    Device,
    /// Host memory.
    Host,
}

/// A card, represented by a folder.
#[derive(Debug)]
pub struct Card {
    folder: PathBuf,
    total: u64,
    number: usize,
    /// Size of a context in bytes.
    context: u64,
    entered: Mutex<Option<Entered>>,
    engine: OnceLock<Option<Engine>>,
}

/// State of this process on a card where it has a context.
#[derive(Debug)]
struct Entered {
    /// Locked file with this process's identity.
    _file: Option<File>,
    /// Memory of the context.
    _memory: Option<Allocation>,
    /// Number of the last allocation that had been lost when this process created its context.
    lost_before: u64,
}

/// An allocation to which this process has a handle or a mapping.
#[derive(Debug)]
pub struct Allocation {
    file: File,
    marker: Option<Marker>,
}

impl Deref for Allocation {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Allocation {
    /// Returns a placeholder for an allocation of a process that is off the card.
    pub fn nothing() -> Option<Self> {
        Some(Self { file: File::open("/dev/null").ok()?, marker: None })
    }

    /// Excludes this allocation from the bytes that NVML reports for this process.
    #[must_use]
    pub fn uncounted(mut self) -> Self {
        self.marker = None;
        self
    }
}

/// A file that indicates to NVML that this process has an allocation.
#[derive(Debug)]
struct Marker(PathBuf);

static MARKERS: Mutex<Option<HashMap<PathBuf, u32>>> = Mutex::new(None);

impl Marker {
    /// Creates a marker. `made` is true if this process created the allocation.
    fn put(folder: &Path, name: &str, made: bool) -> Self {
        let path = folder.join(format!("holds.{}.{}.{name}", identity(), if made { "made" } else { "imported" }));
        let mut markers = MARKERS.lock().unwrap_or_else(PoisonError::into_inner);
        let count = markers.get_or_insert_default().entry(path.clone()).or_default();
        *count += 1;
        if *count == 1 {
            let _ = fs::write(&path, "");
        }
        Self(path)
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        let mut markers = MARKERS.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(count) = markers.as_mut().and_then(|markers| markers.get_mut(&self.0)) else { return };
        *count -= 1;
        if *count == 0 {
            let _ = fs::remove_file(&self.0);
        }
    }
}

/// Returns a name for this process that is unique across namespaces.
fn identity() -> &'static str {
    static IDENTITY: OnceLock<String> = OnceLock::new();
    IDENTITY.get_or_init(|| {
        let mut bytes = [0; 8];
        // SAFETY: the buffer is as long as the given length.
        unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        format!("{:016x}", u64::from_ne_bytes(bytes))
    })
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

/// Returns all cards of the machine.
pub fn all() -> &'static [Card] {
    static ALL: OnceLock<Vec<Card>> = OnceLock::new();
    ALL.get_or_init(|| {
        let folder = std::env::var_os(FOLDER).map_or_else(|| std::env::temp_dir().join("fake-cuda"), PathBuf::from);
        let (mib, context) = (number(MEMORY).unwrap_or(256), number(CONTEXT).unwrap_or(0));
        let place = |at| if at == 0 { folder.clone() } else { folder.join(format!("card-{at}")) };
        let count = number(CARDS).unwrap_or(1).clamp(1, 8) as usize;
        (0..count).map(|at| Card { number: at, context: context << 20, ..Card::open(&place(at), mib) }).collect()
    })
}

/// Cards visible to this process, once it has been restored on another card.
static MOVED: RwLock<Option<&'static [usize]>> = RwLock::new(None);

/// Exchanges two cards in this process's list of visible cards. Devices keep their numbers. Leaks the old list.
pub fn exchange(from: usize, to: usize) {
    let other = |card: &usize| match *card {
        card if card == from => to,
        card if card == to => from,
        card => card,
    };
    let cards: Vec<usize> = visible().iter().map(other).collect();
    *MOVED.write().unwrap_or_else(PoisonError::into_inner) = Some(Box::leak(cards.into_boxed_slice()));
}

/// Returns the cards visible to this process, in the order of its devices. The first call, in `cuInit`, reads
/// `CUDA_VISIBLE_DEVICES`.
pub fn visible() -> &'static [usize] {
    let moved = *MOVED.read().unwrap_or_else(PoisonError::into_inner);
    moved.unwrap_or_else(at_start)
}

/// Returns the time after which imports fail if this process was restored on a card with the file `unimportable` in its
/// folder. The driver can restore processes on such a card, but cannot import memory for them. The file may contain the
/// time in milliseconds.
pub fn unimportable_after() -> Option<Duration> {
    MOVED.read().unwrap_or_else(PoisonError::into_inner).as_ref()?;
    let card = all().get(*visible().first()?)?;
    let text = std::fs::read_to_string(card.folder.join("unimportable")).ok()?;
    Some(Duration::from_millis(text.trim().parse().unwrap_or(0)))
}

/// Delays the exit of this process by 300 s if it has lost a card whose file `exit-waits` contains the process's name.
extern "C" fn wait_for_lost_cards() {
    let own = fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let waits = |card: &&Card| {
        let named = fs::read_to_string(card.folder.join("exit-waits"));
        card.is_reset() && named.is_ok_and(|name| name.trim() == own.trim())
    };
    if all().iter().any(|card| waits(&card)) {
        std::thread::sleep(Duration::from_secs(300));
    }
}

/// Returns true if this process sees a card only because it was restored there.
pub fn is_late(card: usize) -> bool {
    visible().contains(&card) && !at_start().contains(&card)
}

/// Returns the cards that were initially visible to this process, in the order of its devices. The first call, in
/// `cuInit`, reads `CUDA_VISIBLE_DEVICES`.
fn at_start() -> &'static [usize] {
    static VISIBLE_CARDS: OnceLock<Vec<usize>> = OnceLock::new();
    VISIBLE_CARDS.get_or_init(|| {
        let Ok(list) = std::env::var(VISIBLE) else { return (0..all().len()).collect() };
        let mut seen = Vec::new();
        for entry in list.split(',').map(str::trim) {
            let by_name = || all().iter().position(|card| !entry.is_empty() && card.name().starts_with(entry));
            let found = entry.parse::<usize>().ok().filter(|at| *at < all().len()).or_else(by_name);
            // Like NVIDIA's driver, stop at the first invalid or repeated entry.
            let Some(found) = found.filter(|found| !seen.contains(found)) else { break };
            seen.push(found);
        }
        seen
    })
}

/// Returns the card of one of this process's devices.
pub fn of_device(device: i32) -> Option<&'static Card> {
    all().get(*visible().get(usize::try_from(device).ok()?)?)
}

/// Returns the folder for files that do not belong to a single card.
pub fn root() -> &'static Path {
    &all()[0].folder
}

fn lock(file: &File, how: i32) -> bool {
    // SAFETY: the descriptor is open.
    unsafe { libc::flock(file.as_raw_fd(), how) == 0 }
}

fn whole_file() -> libc::flock {
    // SAFETY: all zeros is a valid value.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = libc::F_WRLCK as i16;
    range
}

/// Acquires a lock for this process. Processes that query the lock get the holder's process ID in their own namespace.
fn lock_as_process(file: &File) -> bool {
    let range = whole_file();
    // SAFETY: the descriptor is open and the pointer valid.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const range) == 0 }
}

/// Returns the process ID of the lock's holder in this process's namespace, 0 if the holder has no ID there, or `None`
/// if the lock is free.
fn holder(file: &File) -> Option<u32> {
    let mut range = whole_file();
    // SAFETY: as above.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut range) == 0 };
    (asked && range.l_type != libc::F_UNLCK as i16).then(|| u32::try_from(range.l_pid).unwrap_or(0))
}

/// An inter-process lock, held until the value is dropped.
pub struct Turn(File);

impl Card {
    /// Opens the card in a folder, and creates the folder if necessary.
    pub fn open(folder: &Path, mib: u64) -> Self {
        let _ = fs::create_dir_all(folder);
        let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        Self { folder, total: mib << 20, number: 0, context: 0, entered: Mutex::new(None), engine: OnceLock::new() }
    }

    /// Returns the card's index among all cards.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Returns the result of `cuDeviceGetUuid`.
    pub fn uuid(&self) -> [u8; 16] {
        let mut uuid = *b"fake cuda card 0";
        uuid[15] += self.number as u8;
        uuid
    }

    /// Returns the card's UUID in NVML's format.
    pub fn name(&self) -> String {
        let hex: String = self.uuid().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    }

    /// Returns the card's PCI address.
    pub fn bus_id(&self) -> String {
        format!("0000:{:02x}:00.0", self.number + 1)
    }

    /// Returns the size of the card's memory in bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the number of the last allocation that was lost in a reset, or 0.
    fn lost(&self) -> u64 {
        fs::read_to_string(self.folder.join("lost")).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    /// Returns true if the allocation with the given name was lost.
    fn is_lost(&self, name: &str) -> bool {
        let number = name.rsplit('-').next().and_then(|number| number.parse::<u64>().ok());
        number.is_some_and(|number| number <= self.lost())
    }

    /// Returns true if a reset has destroyed this process's contexts, which is permanent.
    pub fn is_reset(&self) -> bool {
        let before = self.entered().as_ref().map(|entered| entered.lost_before);
        before.is_some_and(|before| self.lost() > before)
    }

    /// Returns true if the card needs a reset, so that contexts cannot be created.
    pub fn is_broken(&self) -> bool {
        self.folder.join("broken").exists()
    }

    /// Returns the engine, or `None` if its file cannot be mapped.
    pub fn engine(&self) -> Option<&Engine> {
        self.engine.get_or_init(|| Engine::open(&self.folder, identity())).as_ref()
    }

    /// Returns the processes whose kernels occupy the card or have recently done so.
    pub fn occupants(&self) -> Vec<u32> {
        let of_it = |name: &str| engine::is_used_by(&self.folder, name);
        let _turn = self.turn("entering");
        let identities = self.identities();
        identities.into_iter().filter(|(identity, pid)| *pid != 0 && of_it(identity)).map(|(_, pid)| pid).collect()
    }

    /// Allocates the card memory of a context of this process.
    pub fn context(&self) -> Result<Option<Allocation>, ()> {
        if self.context == 0 {
            return Ok(None);
        }
        self.allocate(Tier::Device, self.context).map(Some).ok_or(())
    }

    fn entered(&self) -> MutexGuard<'_, Option<Entered>> {
        self.entered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if this process has a context on the card.
    pub fn is_entered(&self) -> bool {
        self.entered().is_some()
    }

    /// Records that this process has a context. Returns false if the card does not have enough memory for a context.
    pub fn enter(&self) -> bool {
        let mut entered = self.entered();
        if entered.is_some() {
            return true;
        }
        let Ok(memory) = self.context() else { return false };
        let _turn = self.turn("entering");
        let path = self.folder.join(format!("process.{}", identity()));
        // A sandbox may deny access to the folder. Then the process has a context, but is not listed.
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path).ok().filter(lock_as_process);
        *entered = Some(Entered { _file: file, _memory: memory, lost_before: self.lost() });
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| {
            // SAFETY: the library is never unloaded, so the handler remains valid.
            let result = unsafe { libc::atexit(wait_for_lost_cards) };
            assert_eq!(result, 0, "the C library registers the handler");
        });
        true
    }

    /// Removes the record of this process's context, and frees the context's memory.
    pub fn leave(&self) {
        let _turn = self.turn("entering");
        if self.entered().take().is_some() {
            let _ = fs::remove_file(self.folder.join(format!("process.{}", identity())));
        }
    }

    /// Returns the IDs of the processes with a context, in this process's namespace, and the card memory of each in
    /// bytes. Omits processes without an ID in this namespace.
    pub fn processes(&self) -> BTreeMap<u32, u64> {
        let _turn = self.turn("entering");
        let names = self.names();
        let pids = self.identities();
        // Each allocation is charged once: to its creator if the creator still has it.
        let mut holders: BTreeMap<&str, (bool, &str)> = BTreeMap::new();
        for name in &names {
            let mut parts = name.strip_prefix("holds.").into_iter().flat_map(|rest| rest.splitn(3, '.'));
            let (Some(identity), Some(kind), Some(memory)) = (parts.next(), parts.next(), parts.next()) else {
                continue;
            };
            if !pids.contains_key(identity) || !memory.starts_with("device-") {
                continue;
            }
            let found = (kind == "made", identity);
            let holder = holders.entry(memory).or_insert(found);
            *holder = (*holder).max(found);
        }
        let mut bytes: BTreeMap<u32, u64> = pids.values().map(|pid| (*pid, 0)).collect();
        for (memory, (_, identity)) in holders {
            let length = fs::metadata(self.folder.join(memory)).map_or(0, |file| file.len());
            *bytes.entry(pids[identity]).or_default() += length;
        }
        bytes.remove(&0);
        bytes
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Returns the identities and IDs of the processes with a context. The caller must hold the lock `entering`.
    fn identities(&self) -> HashMap<String, u32> {
        let names = self.names();
        let mut pids = HashMap::new();
        for name in &names {
            let Some(identity) = name.strip_prefix("process.") else { continue };
            if identity == self::identity() && self.is_entered() {
                // Do not open the file, because closing it would release the lock.
                pids.insert(identity.to_owned(), std::process::id());
                continue;
            }
            let Ok(file) = OpenOptions::new().write(true).open(self.folder.join(name)) else { continue };
            match holder(&file) {
                Some(pid) => {
                    pids.insert(identity.to_owned(), pid);
                }
                None => {
                    // The process has exited.
                    let _ = fs::remove_file(self.folder.join(name));
                    let marks = format!("holds.{identity}.");
                    for marker in names.iter().filter(|name| name.starts_with(&marks)) {
                        let _ = fs::remove_file(self.folder.join(marker));
                    }
                }
            }
        }
        pids
    }

    /// Acquires the lock with the given name.
    pub fn turn(&self, name: &str) -> Option<Turn> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(self.folder.join(name)).ok()?;
        lock(&file, libc::LOCK_EX).then_some(Turn(file))
    }

    /// Returns the card memory in use, in bytes. Removes the files of allocations that are lost or not open in any
    /// process.
    fn used(&self) -> u64 {
        let mut used = 0;
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if !name.starts_with("device-") && !name.starts_with("host-") {
                continue;
            }
            // Open the file again, because only another file description can detect the lock.
            let Ok(file) = OpenOptions::new().read(true).open(entry.path()) else { continue };
            if self.is_lost(&name) || lock(&file, libc::LOCK_EX | libc::LOCK_NB) {
                let _ = fs::remove_file(entry.path());
            } else if name.starts_with("device-") {
                used += file.metadata().map_or(0, |m| m.len());
            }
        }
        used
    }

    /// Returns the free card memory in bytes.
    pub fn free(&self) -> u64 {
        let _turn = self.turn("allocating");
        self.total.saturating_sub(self.used())
    }

    /// Allocates memory. Handles, descriptors and mappings keep its file description open.
    pub fn allocate(&self, tier: Tier, bytes: u64) -> Option<Allocation> {
        let _turn = self.turn("allocating")?;
        if tier == Tier::Device && self.used().checked_add(bytes)? > self.total {
            return None;
        }
        let kind = if tier == Tier::Device { "device" } else { "host" };
        let number = fs::read_to_string(self.folder.join("number")).ok().and_then(|t| t.parse::<u64>().ok());
        let number = number.unwrap_or(0) + 1;
        fs::write(self.folder.join("number"), number.to_string()).ok()?;
        let name = format!("{kind}-{number}");
        let path = self.folder.join(&name);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).ok()?;
        file.set_len(bytes).ok()?;
        let marker = Some(Marker::put(&self.folder, &name, true));
        lock(&file, libc::LOCK_EX | libc::LOCK_NB).then_some(Allocation { file, marker })
    }

    /// Returns a descriptor's allocation with its tier and size in bytes, if it belongs to this card.
    pub fn import(&self, file: File) -> Result<(Allocation, Tier, u64), File> {
        let Some((name, tier, bytes)) = self.identify(&file) else { return Err(file) };
        let marker = Some(Marker::put(&self.folder, &name, false));
        Ok((Allocation { file, marker }, tier, bytes))
    }

    /// Returns the name, tier and size in bytes of a descriptor's allocation.
    fn identify(&self, file: &File) -> Option<(String, Tier, u64)> {
        let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        // Compare the files themselves, because the folder may have a different path in a container.
        let name = path.file_name()?.to_string_lossy().into_owned();
        if self.is_lost(&name) {
            return None;
        }
        let (here, there) = (fs::metadata(self.folder.join(&name)).ok()?, file.metadata().ok()?);
        if (here.dev(), here.ino()) != (there.dev(), there.ino()) {
            return None;
        }
        let tier = if name.starts_with("device-") {
            Tier::Device
        } else if name.starts_with("host-") {
            Tier::Host
        } else {
            return None;
        };
        Some((name, tier, file.metadata().ok()?.len()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&self.0, libc::LOCK_UN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_frees_all_memory_and_lets_none_of_it_be_imported() {
        let folder = tempfile::tempdir().expect("a folder");
        let card = Card::open(folder.path(), 8);
        let lost = card.allocate(Tier::Device, 4 << 20).expect("there is room");
        fs::write(folder.path().join("lost"), "1").expect("written");
        assert_eq!(card.free(), 8 << 20);
        assert!(card.import(lost.try_clone().expect("a descriptor")).is_err());
        let kept = card.allocate(Tier::Device, 4 << 20).expect("there is room");
        assert_eq!(card.free(), 4 << 20);
        assert!(card.import(kept.try_clone().expect("a descriptor")).is_ok());
    }

    #[test]
    fn memory_lives_as_long_as_anything_of_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let card = Card::open(folder.path(), 4);
        let first = card.allocate(Tier::Device, 3 << 20).expect("fits");
        assert!(card.allocate(Tier::Device, 2 << 20).is_none(), "the card is full");
        assert!(card.allocate(Tier::Host, 2 << 20).is_some(), "the host is not");
        let second = first.try_clone().expect("a descriptor of the same description");
        assert_eq!(card.identify(&second).map(|(_, tier, bytes)| (tier, bytes)), Some((Tier::Device, 3 << 20)));
        drop(first);
        assert_eq!(card.free(), 1 << 20, "a descriptor is left");
        drop(second);
        assert_eq!(card.free(), 4 << 20);
        assert_eq!(
            fs::read_dir(folder.path())
                .expect("folder")
                .filter(|e| { e.as_ref().is_ok_and(|e| e.file_name().to_string_lossy().starts_with("device-")) })
                .count(),
            0
        );
    }
}
