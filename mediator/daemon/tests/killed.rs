//! Kills the daemon while it serves a VMM. The next daemon takes over the connection, with the device in its reset
//! state.

mod support;

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::{Value, json};
use support::{Manager, Place, Service, WAIT_TIMEOUT};
use vmm_glue::client::{Client, ClientError, memory_file, wait_event};
use vmm_glue::protocol::{Command, DmaMap, RegionAccess};
use zerocopy::IntoBytes;

const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 128\n";
const WEB: &str = "[[vm]]\nname = \"web\"\ncard = \"card0\"\nvram_mib = 16\napertures = \"trapped\"\n";
const CONFIG: u32 = 7;
const MSI: u32 = 1;
/// Number of times that the daemon is killed while a VMM is busy.
const KILLS: u32 = 24;
/// Maximum number of kills that leave a request without a response. This happens only if the daemon is killed between
/// marking a response as sent and sending it, which takes a few hundred nanoseconds (decision 129).
const UNANSWERED: u32 = 2;
/// Timeout for a response.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Contents of the descriptor store for a VMM with one memory file and one interrupt.
const WHOLE: [&str; 6] = ["daemon/admin", "vm/web", "vmm/web", "vmm/web/0", "vmm/web/1", "vmm/web/journal"];

fn connect(place: &Place) -> Client {
    let client = Client::connect(&place.path("web.sock")).unwrap();
    client.set_timeout(Some(WAIT_TIMEOUT)).unwrap();
    client
}

/// Stops the daemon's process, so that incoming messages stay in its sockets.
fn stop(daemon: &Service) {
    let pid = Pid::from_child(&daemon.0);
    kill_process(pid, Signal::STOP).unwrap();
    assert!(waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap().1.stopped());
}

fn shown(place: &Place) -> Value {
    place.ctl_json(&["vm", "show", "web"])
}

/// A client with its state, for comparison before and after a kill.
struct Vmm {
    client: Client,
    file: OwnedFd,
    msi: Vec<OwnedFd>,
}

impl Vmm {
    /// Connects, lends memory, sets up an interrupt, and configures the device like an operating system.
    fn new(place: &Place) -> Self {
        let mut client = connect(place);
        let file = memory_file(0x4000, true).unwrap();
        client.dma_map(0x1000, 0x2000, true, Some((file.as_fd(), 0x1000))).unwrap();
        client.dma_map(0x8000, 0x1000, false, Some((file.as_fd(), 0))).unwrap();
        let msi = client.attach_irqs(MSI, 1).unwrap();
        for (at, value) in [(0x10, 0xfc00_0000), (0x14, 0xe000_000c), (0x6c, 0xfee0_0000), (0x68, 0x0081_7805)] {
            client.write32(CONFIG, at, value).unwrap();
        }
        client.write(CONFIG, 4, &6u16.to_le_bytes()).unwrap();
        Self { client, file, msi }
    }

    fn configuration(&mut self) -> Vec<u32> {
        (0..64).map(|word| self.client.read32(CONFIG, word * 4).unwrap()).collect()
    }
}

/// Starts a daemon that serves a VMM, and waits until all state is in the service manager's descriptor store.
fn served(place: &Place) -> (Manager<'_>, Service, Vmm) {
    let manager = Manager::new(place);
    let daemon = manager.start();
    let vmm = Vmm::new(place);
    manager.until_kept(&WHOLE);
    (manager, daemon, vmm)
}

/// Tests that a VMM cannot overload the service manager, and that the rate limit loses no data.
#[test]
fn vmm_with_repeated_maps_does_not_flood_service_manager() {
    /// Maximum number of messages in a burst (`fdstore::pace`).
    const BURST_MESSAGES: u64 = 128;
    /// Interval between messages after a burst.
    const MESSAGE_INTERVAL: Duration = Duration::from_millis(60);
    const MAPPED_GPA: u64 = 0x10_0000;
    let place = Place::new(&format!("{CARD}{WEB}"));
    let (manager, daemon, mut vmm) = served(&place);
    let stored = || manager.wait(|heard| Some(heard.stored));
    let (begin, before) = (Instant::now(), stored());
    let bound = || BURST_MESSAGES + u64::try_from(begin.elapsed().as_millis() / MESSAGE_INTERVAL.as_millis()).unwrap();
    let turn = |vmm: &mut Vmm, file: &OwnedFd| {
        vmm.client.dma_map(MAPPED_GPA, 0x1000, true, Some((file.as_fd(), 0))).unwrap();
        vmm.client.dma_unmap(MAPPED_GPA, 0x1000).unwrap();
    };
    let file = memory_file(0x1000, true).unwrap();
    (0..1000).for_each(|_| turn(&mut vmm, &file));
    let one_page = stored() - before;
    println!("one page, 1,000 times: {one_page} messages in {:?}", begin.elapsed());
    assert!(one_page <= bound(), "{one_page} of at most {}", bound());
    // The VMM lends files that are not in the store yet, so it has to wait.
    (0..100).for_each(|_| turn(&mut vmm, &memory_file(0x1000, true).unwrap()));
    let sent = stored() - before;
    println!("100 more files: {sent} messages in {:?}", begin.elapsed());
    assert!(sent <= bound(), "{sent} of at most {}", bound());
    // The store contains the complete current state for the next daemon.
    vmm.client.dma_map(MAPPED_GPA, 0x1000, true, Some((file.as_fd(), 0))).unwrap();
    drop(daemon);
    let _daemon = manager.start();
    vmm.configuration();
    assert_eq!(shown(&place)["transport"]["dma_regions"], 3);
}

#[test]
fn vmm_survives_daemon_kills_with_reset_device() {
    let place = Place::new(&format!("{CARD}{WEB}"));
    let (manager, mut daemon, mut vmm) = served(&place);
    let before = vmm.configuration();
    assert_eq!((before[4], before[1] & 0xffff, before[26] >> 16), (0xfc00_0000, 6, 0x81));
    for deaths in 1..=3 {
        drop(daemon);
        daemon = manager.start();
        assert_eq!(vmm.configuration(), before, "death {deaths}");
        manager.until_kept(&WHOLE);
        let shown = shown(&place);
        assert_eq!(shown["state"], "connected");
        assert_eq!(shown["transport"]["daemon_deaths_survived"], deaths);
        assert_eq!((&shown["transport"]["dma_regions"], &shown["ram"]["lent_bytes"]), (&json!(2), &json!(0x3000)));
        let log = fs::read_to_string(place.path("log")).unwrap();
        assert!(log.contains("the previous daemon was killed: its VMM continues"), "{log}");
        // PMC_BOOT_0 shows that the device responds.
        assert_eq!(vmm.client.read32(0, 0).unwrap() >> 20, 0x0c0);
    }
    // The interrupt has not fired spuriously. The card has no configured interrupt, so none can be pending.
    assert!(wait_event(vmm.msi[0].as_fd(), Duration::ZERO).is_err());
    // The VMM withdraws lent memory, and the store is updated.
    assert_eq!(vmm.client.dma_unmap(0x1000, 0x2000).unwrap(), 0x2000);
    assert_eq!(vmm.client.dma_unmap(0x8000, 0x1000).unwrap(), 0x1000);
    vmm.client.disable_irqs(MSI).unwrap();
    manager.until_kept(&["daemon/admin", "vm/web", "vmm/web", "vmm/web/journal"]);
    drop(vmm);
    manager.until_kept(&["daemon/admin", "vm/web"]);
    // The store receives the descriptors of the VM's next VMM, and loses them when the VM is removed.
    let mut vmm = Vmm::new(&place);
    manager.until_kept(&WHOLE);
    assert_eq!(vmm.client.read32(CONFIG, 0).unwrap(), 0x06d8_10de);
    assert!(place.ctl(&["vm", "remove", "web"]).status.success());
    manager.until_kept(&["daemon/admin"]);
    drop(daemon);
}

#[test]
fn mapped_apertures_after_kill_show_memory_of_next_device() {
    let mapped = WEB.replace("trapped", "remapped");
    let place = Place::new(&format!("{CARD}{mapped}"));
    let manager = Manager::new(&place);
    let mut daemon = manager.start();
    let mut vmm = Vmm::new(&place);
    // Mapped regions, each with an offset in its mapped part.
    let places = [(0, 0x70_1000), (1, 20 << 20), (3, 1 << 20)];
    let apertures = places.map(|(region, at)| (region, at, vmm.client.map_region(region).unwrap()));
    // The store contains three more files than for a VMM without mappings.
    let whole = [&WHOLE[..], &["vmm/web/2", "vmm/web/3", "vmm/web/4"]].concat();
    let mut whole: Vec<_> = whole.into_iter().collect();
    whole.sort_unstable();
    manager.until_kept(&whole);
    for deaths in 1..=2 {
        apertures.iter().for_each(|(_, at, mapped)| mapped.write(*at, b"of the previous guest").unwrap());
        drop(daemon);
        daemon = manager.start();
        // The device is in its reset state, and uses the memory that the VMM still maps.
        let boot = vmm.client.read32(0, 0);
        let boot = boot.unwrap_or_else(|error| panic!("{error}\n{}", fs::read_to_string(place.path("log")).unwrap()));
        assert_eq!(boot >> 20, 0x0c0);
        for (region, at, mapped) in &apertures {
            let mut seen = [1; 21];
            mapped.read(*at, &mut seen).unwrap();
            assert_eq!(seen, [0; 21], "region {region}, death {deaths}");
            // A new mapping of the device's memory shows the same contents.
            let now = vmm.client.map_region(*region).unwrap();
            mapped.write(*at, &[7]).unwrap();
            let mut byte = [0];
            now.read(*at, &mut byte).unwrap();
            assert_eq!(byte, [7], "region {region}, death {deaths}");
        }
        assert_eq!(shown(&place)["transport"]["daemon_deaths_survived"], deaths);
        manager.until_kept(&whole);
    }
    drop(vmm);
    manager.until_kept(&["daemon/admin", "vm/web"]);
    drop(daemon);
}

#[test]
fn request_in_socket_is_answered_by_next_daemon() {
    let place = Place::new(&format!("{CARD}{WEB}"));
    let (manager, mut daemon, mut vmm) = served(&place);
    // The VMM sends a read request.
    stop(&daemon);
    let access = RegionAccess { offset: 0, region: CONFIG, count: 4 };
    let id = vmm.client.send(Command::REGION_READ, 0, access.as_bytes(), &[]).unwrap();
    drop(daemon);
    daemon = manager.start();
    let answer = vmm.client.reply(id).unwrap();
    assert_eq!(answer.body[16..], 0x06d8_10deu32.to_le_bytes());
    // The VMM lends memory by sending a file.
    stop(&daemon);
    let body = DmaMap { argsz: 32, flags: 3, offset: 0x3000, address: 0x10_0000, size: 0x1000 };
    let id = vmm.client.send(Command::DMA_MAP, 0, body.as_bytes(), &[vmm.file.as_fd()]).unwrap();
    drop(daemon);
    daemon = manager.start();
    vmm.client.reply(id).unwrap();
    assert_eq!(shown(&place)["transport"]["dma_regions"], 3);
    assert_eq!(vmm.client.dma_unmap(0x10_0000, 0x1000).unwrap(), 0x1000);
    drop(daemon);
}

#[test]
fn kill_at_any_time_duplicates_no_answer_and_loses_few() {
    let place = Place::new(&format!("{CARD}{WEB}"));
    let manager = Manager::new(&place);
    let mut daemon = manager.start();
    let patient = || {
        let vmm = Vmm::new(&place);
        vmm.client.set_timeout(Some(ANSWER_TIMEOUT)).unwrap();
        vmm
    };
    let mut vmm = Some(patient());
    let (mut lost, mut unanswered, mut asked) = (0, 0, 0u64);
    for round in 0..KILLS {
        let one = vmm.get_or_insert_with(patient);
        let stop = AtomicBool::new(false);
        let maps = round % 2 == 1;
        let ended = std::thread::scope(|scope| {
            let busy = scope.spawn(|| -> Result<(), ClientError> {
                while !stop.load(Ordering::Acquire) {
                    asked += 1;
                    // The client also checks the sequence number, so that a duplicate response does not match.
                    assert_eq!(one.client.read32(CONFIG, 0)?, 0x06d8_10de);
                    one.client.write32(CONFIG, 0x10, 0xfc00_0000)?;
                    if maps {
                        one.client.dma_map(0x20_0000, 0x1000, true, Some((one.file.as_fd(), 0x2000)))?;
                        assert_eq!(one.client.dma_unmap(0x20_0000, 0x1000)?, 0x1000);
                    }
                }
                Ok(())
            });
            std::thread::sleep(Duration::from_micros(20_000 + 3_137 * u64::from(round)));
            daemon.0.kill().unwrap();
            daemon.0.wait().unwrap();
            daemon = manager.start();
            std::thread::sleep(Duration::from_millis(20));
            stop.store(true, Ordering::Release);
            busy.join().unwrap()
        });
        match ended {
            Ok(()) => {}
            // The daemon was killed before the service manager received all descriptors, so the VMM's connection was
            // closed.
            Err(ClientError::Closed) if maps => {
                lost += 1;
                vmm = None;
            }
            Err(ClientError::Io(error)) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                unanswered += 1;
                vmm = None;
            }
            Err(error) => panic!("round {round}: {error}\n{}", fs::read_to_string(place.path("log")).unwrap()),
        }
    }
    println!(
        "{KILLS} kills under {asked} rounds of requests; {lost} VMMs lost their device with a descriptor, {unanswered} wait for a response"
    );
    assert!(lost <= KILLS / 4, "{lost} VMMs have lost their device");
    assert!(unanswered <= UNANSWERED, "{unanswered} requests have no response");
    drop(vmm);
    manager.until_kept(&["daemon/admin", "vm/web"]);
    drop(daemon);
}

#[test]
fn daemon_that_came_by_an_upgrade_leaves_a_journal_as_well() {
    let place = Place::new(&format!("{CARD}{WEB}"));
    let (manager, mut daemon, mut vmm) = served(&place);
    let before = vmm.configuration();
    let upgraded = place.ctl_json(&["daemon", "upgrade"]);
    assert!(daemon.0.wait().unwrap().success());
    // The next daemon serves the VMM, and the service manager has received all earlier messages.
    assert_eq!(vmm.configuration(), before);
    manager.wait(|heard| {
        heard.said.clear();
        Some(())
    });
    manager.until("WATCHDOG=1");
    manager.until_kept(&WHOLE);
    let number = i32::try_from(upgraded["pid"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(number).unwrap(), Signal::KILL).unwrap();
    // After an upgrade, the process is not a child of the test.
    let state = || fs::read_to_string(format!("/proc/{number}/stat"));
    let began = Instant::now();
    while state().is_ok_and(|state| !state.contains(") Z ")) {
        assert!(began.elapsed() < WAIT_TIMEOUT, "process {number} does not exit");
        std::thread::sleep(Duration::from_millis(1));
    }
    let daemon = manager.start();
    assert_eq!(vmm.configuration(), before);
    assert_eq!(shown(&place)["transport"]["daemon_deaths_survived"], 1);
    manager.until_kept(&WHOLE);
    drop(daemon);
}

#[test]
fn invalid_or_orphaned_journal_is_removed_and_others_survive() {
    let two = format!("{CARD}{WEB}{}", WEB.replace("web", "other"));
    let place = Place::new(&two);
    let manager = Manager::new(&place);
    let daemon = manager.start();
    let mut vmm = Vmm::new(&place);
    let mut other = Client::connect(&place.path("other.sock")).unwrap();
    other.set_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let names = ["vmm/other", "vmm/other/journal"];
    let all = |more: &[&str]| {
        let mut all = [&["vm/other"], &WHOLE[..], more].concat();
        all.sort_unstable();
        all.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let kept = |names: &[String]| manager.until_kept(&names.iter().map(String::as_str).collect::<Vec<_>>());
    kept(&all(&names));
    drop(daemon);
    // Put garbage in the store: next to a journal, in place of a journal, and for VMs that do not exist.
    let garbage = || memfd_create("garbage", MemfdFlags::CLOEXEC).unwrap();
    manager.wait(|heard| {
        heard.kept.iter_mut().filter(|(name, _)| name == "vmm/web/journal").for_each(|(_, fd)| *fd = garbage());
        for name in ["vmm/gone/journal", "vmm/gone/3", "vmm/web/99", "vmm/web/x", "vm/what", "vmm/gone"] {
            heard.kept.push((name.to_owned(), garbage()));
        }
        Some(())
    });
    let daemon = manager.start();
    assert_eq!(other.read32(CONFIG, 0).unwrap(), 0x06d8_10de);
    assert!(matches!(vmm.client.read32(CONFIG, 0), Err(ClientError::Closed | ClientError::Io(_))));
    kept(&["daemon/admin", "vm/other", "vm/web", "vmm/other", "vmm/other/journal"].map(str::to_owned));
    let log = fs::read_to_string(place.path("log")).unwrap();
    assert!(log.contains("has lost its device"), "{log}");
    drop(daemon);
}

#[test]
fn vmm_is_disconnected_if_fd_store_is_full_and_log_has_remedy() {
    let place = Place::new(&format!("{CARD}{WEB}"));
    let manager = Manager::new(&place);
    let start = || {
        let mut command = manager.manager.command(std::path::Path::new(support::DAEMON)).unwrap();
        command.arg("--config").arg(place.path("m.toml")).env("FDSTORE", "130");
        let daemon = Service(command.stderr(fs::File::create(place.path("log")).unwrap()).spawn().unwrap());
        manager.until("READY=1");
        daemon
    };
    let daemon = start();
    let mut vmm = Vmm::new(&place);
    manager.until_kept(&["daemon/admin", "vm/web", "vmm/web"]);
    let log = fs::read_to_string(place.path("log")).unwrap();
    assert!(log.contains("FileDescriptorStoreMax=1026"), "{log}");
    drop(daemon);
    let daemon = start();
    // Skip the daemon's messages that precede the end of the connection.
    let end = std::iter::from_fn(|| Some(vmm.client.receive_message())).find_map(Result::err);
    assert!(matches!(end, Some(ClientError::Closed)), "{end:?}");
    manager.until_kept(&["daemon/admin", "vm/web"]);
    drop(daemon);
}
