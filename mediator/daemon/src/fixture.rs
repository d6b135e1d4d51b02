//! A test daemon in its own directory, with software cards or with cards that serve plain memory. Panics on misuse.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use api::VmState;
use card_manager::shortage::Shortage;
use config::{CardSpec, Config, VmSpec};
use parking_lot::Mutex;
use rig::RemoteGuest;
use rig::driver::{Channel, Driver, M2MF, PAGE, m2mf_copy, object};
use tempfile::TempDir;
use vmm_glue::client::Client;
use vmm_glue::device::NUM_REGIONS;
use vmm_glue::echo::EchoDevice;
use vmm_glue::{AccessError, Ack, Device, DmaRegion, Link, MapError, RegionIndex, RegionInfo};

use super::backend::{BackendError, BackendStatus, Built, CardBackend, CardStatus, OpenCard, VmBackend};
use super::{Daemon, DaemonError, cards};
use listening::Sockets;
use overrides::OverrideStore;

/// VRAM size of each VM, in MiB.
const VM_MIB: u64 = 16;
/// Virtual address of the source buffer.
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;
/// Region index of BAR0 in vfio-user messages.
pub const BAR0: u32 = 0;
/// Offset at which a write makes the device panic.
pub const PANIC: u64 = 0x100;
/// Offset at which a write makes the device check that its client's memory is shared.
pub const CHECK: u64 = 0x200;
/// Size of BAR0 in bytes.
const BAR0_BYTES: usize = 4096;

/// Names of the virtual machines whose backends were released.
pub type Released = Arc<Mutex<Vec<String>>>;

/// Opens cards that serve plain memory, and lists the released VMs.
pub struct FakeOpener(pub Released);

impl OpenCard for FakeOpener {
    fn open(&self, card: &CardSpec) -> Result<Box<dyn CardBackend>, BackendError> {
        if card.name == "broken" {
            return Err(BackendError::failed("it does not respond"));
        }
        Ok(Box::new(FakeCard(Arc::clone(&self.0))))
    }
}

struct FakeCard(Released);

impl CardBackend for FakeCard {
    fn status(&self) -> CardStatus {
        let pci_id = "10de:06d8".to_owned();
        CardStatus { pci_id, channels: 128, vram_free_mib: Some(400), ..CardStatus::default() }
    }

    fn build(&self, vm: &VmSpec, link: &Link) -> Result<Built, BackendError> {
        if vm.name == "greedy" {
            return Err(BackendError::lacking(Shortage::new("the card has no memory left", "request less")));
        }
        let device = FakeDevice { echo: EchoDevice::new(BAR0_BYTES, 0x10de, 0x06d8), link: link.clone() };
        let backend = FakeBackend { name: vm.name.clone(), released: Arc::clone(&self.0) };
        Ok(Built { device: Box::new(device), backend: Arc::new(backend) })
    }
}

struct FakeBackend {
    name: String,
    released: Released,
}

impl VmBackend for FakeBackend {
    fn status(&self) -> BackendStatus {
        let denied = |place: &str, offset, reads| api::Denied {
            place: place.to_owned(),
            offset,
            reason: "unknown register".to_owned(),
            reads,
            writes: 1,
        };
        BackendStatus {
            vram_mib: 64,
            channels_used: 3,
            driver: api::Driver { pci_id: "10de:06d8".to_owned(), bus_master: true, ..api::Driver::default() },
            denied: vec![denied("PFB.THING", Some(0x10_0000), 4), denied("BAR1", None, 0)],
            counters: BTreeMap::from([("doorbells".to_owned(), 7)]),
            programs: Vec::new(),
        }
    }

    fn release(&self) -> Result<(), BackendError> {
        self.released.lock().push(self.name.clone());
        Ok(())
    }
}

/// Plain memory with two offsets that trigger actions.
struct FakeDevice {
    echo: EchoDevice,
    link: Link,
}

impl Device for FakeDevice {
    fn regions(&self) -> [RegionInfo; NUM_REGIONS] {
        self.echo.regions()
    }

    fn region_read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        self.echo.region_read(region, offset, data)
    }

    fn region_write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<Ack, AccessError> {
        match (region, offset) {
            (RegionIndex::Bar0, PANIC) => panic!("as requested by the test"),
            (RegionIndex::Bar0, CHECK) => self.link.check_shared(),
            _ => {}
        }
        self.echo.region_write(region, offset, data)
    }

    fn dma_map(&mut self, _: &DmaRegion) -> Result<(), MapError> {
        Ok(())
    }

    fn dma_unmap(&mut self, _: u64, _: u64) {}

    fn reset(&mut self) {}

    fn disconnected(&mut self) {}
}

/// A test daemon in its own directory.
pub struct Fixture {
    /// Directory of the daemon.
    pub folder: TempDir,
    /// Daemon under test.
    pub daemon: Arc<Daemon>,
    /// Names of the virtual machines whose backends were released.
    pub released: Released,
}

impl Default for Fixture {
    fn default() -> Self {
        Self::new()
    }
}

impl Fixture {
    /// Starts a daemon with two cards that serve plain memory.
    #[must_use]
    pub fn new() -> Self {
        Self::with_listeners(|_| HashMap::new())
    }

    /// Like [`Self::new`], but with sockets from systemd units.
    ///
    /// # Panics
    /// Panics if the daemon does not start.
    #[must_use]
    pub fn with_listeners(listeners: impl FnOnce(&Path) -> Listeners) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let released = Released::default();
        let config = config(folder.path(), &["card0", "card1"]);
        let daemon = start(config, &FakeOpener(Arc::clone(&released)), listeners(folder.path())).unwrap();
        Self { folder, daemon, released }
    }

    /// Starts a daemon with the software cards of this configuration.
    pub fn real(cards: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = Config::parse(&format!("{}{cards}", daemon_table(folder.path())), "test").unwrap();
        let daemon = start(config, &cards::Cards::default(), HashMap::new()).unwrap();
        Self { folder, daemon, released: Released::default() }
    }

    /// Returns the path of a file in the daemon's directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Connects a client to a VM.
    ///
    /// # Panics
    /// Panics if no server listens on the socket.
    #[must_use]
    pub fn connect(&self, name: &str) -> Client {
        let client = Client::connect(&self.path(&format!("{name}.sock"))).unwrap();
        client.set_timeout(Some(Duration::from_secs(30))).unwrap();
        client
    }

    /// Returns a VM's state.
    ///
    /// # Panics
    /// Panics if the VM does not exist.
    #[must_use]
    pub fn state(&self, name: &str) -> VmState {
        self.daemon.vm(name).unwrap().state
    }
}

/// Sockets from systemd units, by name.
pub(crate) type Listeners = HashMap<String, UnixListener>;

/// Starts a daemon that does not save overrides. Returns the same errors as [`Daemon::start`].
pub(crate) fn start(config: Config, opener: &dyn OpenCard, listeners: Listeners) -> Result<Arc<Daemon>, DaemonError> {
    let sockets = Sockets::new(listening::Activated { listeners, ..Default::default() });
    Daemon::start(config, opener, sockets, OverrideStore::default())
}

/// Returns a configuration with software cards for a daemon in `folder`.
///
/// # Panics
/// Panics if the directory's path is not a valid TOML string.
#[must_use]
pub fn config(folder: &Path, cards: &[&str]) -> Config {
    let cards: String = cards
        .iter()
        .map(|name| format!("[[card]]\nname = \"{name}\"\nkind = \"simgpu\"\nvram_mib = 512\nreserve_mib = 32\n"))
        .collect();
    Config::parse(&format!("{}{cards}", daemon_table(folder)), "test").unwrap()
}

/// Returns the `[daemon]` table for a daemon in `folder`.
#[must_use]
pub fn daemon_table(folder: &Path) -> String {
    let folder = folder.display();
    format!("[daemon]\nadmin_socket = \"{folder}/admin.sock\"\nsocket_dir = \"{folder}\"\n")
}

/// Waits until `so` returns true.
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A daemon whose admin API is being served.
pub struct Served {
    /// The daemon and its directory.
    pub fixture: Fixture,
    /// Address of the web page.
    pub page: std::net::SocketAddr,
    /// Number of watchdog notifications from the API thread.
    pub fed: Arc<AtomicU64>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl Default for Served {
    fn default() -> Self {
        Self::new()
    }
}

impl Served {
    /// Starts a daemon with two cards that serve plain memory, and serves its API.
    #[must_use]
    pub fn new() -> Self {
        Self::over(Fixture::new())
    }

    /// Serves the API of an existing daemon.
    ///
    /// # Panics
    /// Panics if a socket cannot be created.
    #[must_use]
    pub fn over(fixture: Fixture) -> Self {
        let page = status_page::listen(([127, 0, 0, 1], 0).into()).unwrap();
        let page_address = page.local_addr().unwrap();
        let listeners = crate::admin::Listeners {
            admin: UnixListener::bind(fixture.path("admin.sock")).unwrap(),
            read_only: Some(UnixListener::bind(fixture.path("read.sock")).unwrap()),
            page: Some(page),
        };
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let daemon = Arc::clone(&fixture.daemon);
        let fed = Arc::<AtomicU64>::default();
        let told = Arc::clone(&fed);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let watched = Arc::clone(&daemon);
            let feed = move || {
                told.fetch_add(1, Ordering::Relaxed);
            };
            runtime.spawn(crate::serving::watch(watched, Duration::from_millis(30), feed));
            runtime.spawn(crate::serving::observe(Arc::clone(&daemon)));
            runtime.block_on(crate::admin::serve(daemon, listeners, async {
                let _ = stopped.await;
            }))
        });
        Self { fixture, page: page_address, fed, stop: Some(stop), thread: Some(thread) }
    }

    /// Stops the server.
    ///
    /// # Errors
    /// Returns the same errors as `admin::serve`.
    pub fn end(&mut self) -> std::io::Result<()> {
        drop(self.stop.take());
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.end().unwrap();
    }
}

/// Starts a daemon with one software card, and appends `more` to the card's table.
#[must_use]
pub fn one_card(more: &str) -> Served {
    let card = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 128\n";
    Served::over(Fixture::real(&format!("{card}{more}")))
}

/// Returns a guest with a channel and two buffers.
pub fn guest(served: &Served, name: &str) -> (Driver<RemoteGuest>, Channel) {
    let socket = served.fixture.path(&format!("{name}.sock"));
    let mut driver = Driver::new(RemoteGuest::connect(&socket, VM_MIB << 20).unwrap());
    let channel = driver.channel(1);
    driver.buffer(&channel, FROM, 1, 1);
    driver.buffer(&channel, TO, 1, 2);
    (driver, channel)
}

/// Submits one copy.
pub fn copy(driver: &mut Driver<RemoteGuest>, channel: &mut Channel) {
    driver.submit(channel, &[object(M2MF), m2mf_copy(FROM, TO, PAGE as u32)].concat());
}
