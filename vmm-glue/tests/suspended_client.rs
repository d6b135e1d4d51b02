//! Tests a server that is suspended and resumes its clients in this process or in another.

mod support;

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use saved_state::{Known, SavedState, Writer};
use support::*;
use vmm_glue::client::{Client, memory_file, wait_event};
use vmm_glue::protocol::{Command, Header, RegionAccess};
use vmm_glue::{Link, SavedClients, Server, ServerOptions, SocketOptions, StopHandle, SuspendedClient};
use zerocopy::IntoBytes;

/// A server that runs on a thread until it is suspended.
struct Served {
    link: Link,
    stop: StopHandle,
    events: Receiver<Event>,
    thread: JoinHandle<(Server, TestDevice, Option<SuspendedClient>)>,
}

impl Served {
    fn new(path: &std::path::Path) -> Self {
        let server = Server::bind(path, &SocketOptions::default(), ServerOptions::default()).unwrap();
        let link = Link::new(IRQS).unwrap();
        Self::with(server, link, vec![0; BAR0_SIZE as usize], None)
    }

    fn with(server: Server, link: Link, bar0: Vec<u8>, parked: Option<SuspendedClient>) -> Self {
        let (sender, events) = channel();
        let mut device = TestDevice::new(link.clone(), sender);
        device.bar0 = bar0;
        let stop = StopHandle::new().unwrap();
        let thread = std::thread::spawn({
            let (link, stop) = (link.clone(), stop.clone());
            move || {
                let parked = server.serve(&link, &mut device, &stop, parked).unwrap();
                (server, device, parked)
            }
        });
        Self { link, stop, events, thread }
    }

    fn rest(self) -> (Server, Link, TestDevice, SuspendedClient) {
        self.stop.park();
        let (server, device, parked) = self.thread.join().unwrap();
        (server, self.link, device, parked.expect("it rests"))
    }

    /// Suspends the server and resumes it in this process.
    fn pause(self) -> Self {
        let (server, link, device, parked) = self.rest();
        Self::with(server, link, device.bar0, Some(parked))
    }

    /// Suspends the server and resumes it from the handed-over state, as another process would.
    fn hand_over(self) -> Self {
        let (server, link, device, parked) = self.rest();
        let (file, descriptors) = written(&parked, &link);
        let next = Link::new(IRQS).unwrap();
        let restored = SuspendedClient::restored(read(&file), descriptors, &next, &ServerOptions::default()).unwrap();
        drop((parked, link));
        Self::with(server, next, device.bar0, Some(restored))
    }

    fn end(self) {
        self.stop.stop();
        self.thread.join().unwrap();
    }
}

fn written(parked: &SuspendedClient, link: &Link) -> (Vec<u8>, Vec<OwnedFd>) {
    let (saved, descriptors) = parked.save(link).unwrap();
    let mut file = Writer::new([3; 16]);
    file.put(1, &saved).unwrap();
    (file.finish(), descriptors)
}

fn read(file: &[u8]) -> SavedClients {
    let mut file = SavedState::parse(file, &[Known::for_part::<SavedClients>()]).unwrap();
    let saved = file.take(1).unwrap();
    file.finish().unwrap();
    saved
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("device.sock");
    (folder, path)
}

fn connected(served: &Served, path: &std::path::Path) -> Client {
    let client = Client::connect(path).unwrap();
    client.set_timeout(Some(EVENT_TIMEOUT)).unwrap();
    assert_eq!(served.events.recv_timeout(EVENT_TIMEOUT), Ok(Event::Connected));
    client
}

/// Returns the bytes of a write of `data` to BAR0.
fn write(id: u16, offset: u64, data: &[u8]) -> Vec<u8> {
    let access = RegionAccess { offset, region: 0, count: u32::try_from(data.len()).unwrap() };
    let size = u32::try_from(16 + access.as_bytes().len() + data.len()).unwrap();
    [Header::request(id, Command::REGION_WRITE, size, 0).as_bytes(), access.as_bytes(), data].concat()
}

fn goes_on(next: impl Fn(Served) -> Served) {
    let (_folder, path) = place();
    let mut served = Served::new(&path);
    let mut client = connected(&served, &path);
    let file = memory_file(0x4000, true).unwrap();
    client.dma_map(0x1000, 0x2000, true, Some((file.as_fd(), 0x1000))).unwrap();
    client.dma_map(0x8000, 0x1000, false, Some((file.as_fd(), 0))).unwrap();
    client.dma_map(0x10_0000, 0x1000, true, None).unwrap();
    let irqs = client.attach_irqs(1, 4).unwrap();
    client.write32(0, 0x10, 0x1234_5678).unwrap();
    for round in 0..4u32 {
        // Send a partial request after a complete posted request.
        client.post(0, 0x40, &round.to_le_bytes()).unwrap();
        let request = write(100, 0x20, &round.to_le_bytes());
        let cut = [3, 15, 20, request.len() - 1][round as usize];
        client.send_raw(&request[..cut], &[]).unwrap();
        served = next(served);
        client.send_raw(&request[cut..], &[]).unwrap();
        client.reply(100).unwrap();
        assert_eq!(client.read32(0, 0x20).unwrap(), round);
        assert_eq!(client.read32(0, 0x40).unwrap(), round, "earlier posted writes arrived earlier");
        assert_eq!(client.read32(0, 0x10).unwrap(), 0x1234_5678);
        // Client memory is still mapped, and interrupts still reach the client.
        rustix::io::pwrite(&file, &round.to_le_bytes(), 0x1800).unwrap();
        let mut word = [0; 4];
        served.link.memory().read(0x1800, &mut word).unwrap();
        assert_eq!(u32::from_le_bytes(word), round);
        assert!(served.link.memory().write(0x8000, &[1]).is_err(), "read only");
        assert!(served.link.interrupts().trigger_msi(2));
        assert_eq!(wait_event(irqs[2].as_fd(), EVENT_TIMEOUT).unwrap(), 1);
        assert_eq!(served.link.client().unwrap().pid, std::process::id().cast_signed());
    }
    // The client unmaps its memory.
    assert_eq!(client.dma_unmap(0x1000, 0x2000).unwrap(), 0x2000);
    assert!(client.dma_unmap(0x8000, 0x2000).is_err() || served.link.memory().snapshot().regions().len() == 1);
    drop(client);
    while served.events.recv_timeout(EVENT_TIMEOUT).unwrap() != Event::Disconnected {}
    let mut second = connected(&served, &path);
    assert_eq!(second.read32(0, 0x10).unwrap(), 0, "the next client finds a reset device");
    served.end();
}

#[test]
fn client_of_a_server_that_rests_sees_only_that_time_passes() {
    goes_on(Served::pause);
}

#[test]
fn client_of_handed_over_server_sees_only_a_delay() {
    goes_on(Served::hand_over);
}

#[test]
fn interrupt_that_was_masked_or_pending_is_so_afterwards() {
    let (_folder, path) = place();
    let mut served = Served::new(&path);
    let mut client = connected(&served, &path);
    let intx = client.attach_irqs(0, 1).unwrap();
    served.link.interrupts().set_intx_level(true);
    assert_eq!(wait_event(intx[0].as_fd(), EVENT_TIMEOUT).unwrap(), 1);
    // MSI has no descriptor yet.
    assert!(!served.link.interrupts().trigger_msi(0));
    served = served.hand_over();
    assert!(wait_event(intx[0].as_fd(), std::time::Duration::ZERO).is_err(), "the interrupt is still masked");
    client.unmask_intx().unwrap();
    assert_eq!(wait_event(intx[0].as_fd(), EVENT_TIMEOUT).unwrap(), 1, "the level is high");
    let msi = client.attach_irqs(1, 1).unwrap();
    assert_eq!(wait_event(msi[0].as_fd(), EVENT_TIMEOUT).unwrap(), 1, "the edge is still pending");
    served.end();
}

#[test]
fn silent_connection_becomes_client_after_handover() {
    let (_folder, path) = place();
    let mut served = Served::new(&path);
    let mut silent = Client::connect_silent(&path).unwrap();
    silent.set_timeout(Some(EVENT_TIMEOUT)).unwrap();
    served = served.hand_over();
    silent.negotiate(0, 1, vmm_glue::client::QEMU_CAPABILITIES).unwrap();
    assert_eq!(silent.read32(0, 0).unwrap(), 0);
    served.end();
}

#[test]
fn server_not_taken_over_continues_and_reports_no_end() {
    let (_folder, path) = place();
    let mut served = Served::new(&path);
    let mut client = connected(&served, &path);
    let file = memory_file(0x1000, true).unwrap();
    client.dma_map(0, 0x1000, true, Some((file.as_fd(), 0))).unwrap();
    for _ in 0..5 {
        let (server, link, device, parked) = served.rest();
        let (saved, descriptors) = written(&parked, &link);
        // Restore all state for another server, and drop the result. Then resume the client here.
        let other = Link::new(IRQS).unwrap();
        drop(SuspendedClient::restored(read(&saved), descriptors, &other, &ServerOptions::default()).unwrap());
        served = Served::with(server, link, device.bar0, Some(parked));
        client.write32(0, 8, 9).unwrap();
    }
    served.end();
}

#[test]
fn missing_or_wrong_descriptors_are_rejected() {
    let (_folder, path) = place();
    let served = Served::new(&path);
    let mut client = connected(&served, &path);
    let file = memory_file(0x1000, true).unwrap();
    client.dma_map(0, 0x1000, true, Some((file.as_fd(), 0))).unwrap();
    let _irqs = client.attach_irqs(1, 1).unwrap();
    let (_, link, _, parked) = served.rest();
    let (saved, descriptors) = written(&parked, &link);
    let another = |fd: &OwnedFd| fd.try_clone().unwrap();
    let refused = |descriptors: Vec<OwnedFd>, irqs| {
        let next = Link::new(irqs).unwrap();
        SuspendedClient::restored(read(&saved), descriptors, &next, &ServerOptions::default()).unwrap_err().to_string()
    };
    let all = || descriptors.iter().map(another).collect::<Vec<_>>();
    for missing in 0..descriptors.len() {
        let said = refused(all()[..missing].iter().map(another).collect(), IRQS);
        assert!(said.contains("is missing"), "{said}");
    }
    // Swap the first descriptor with each of the others.
    for place in 1..descriptors.len() {
        let mut changed = all();
        changed.swap(0, place);
        refused(changed, IRQS);
    }
    let other = vmm_glue::IrqCounts { msi: 2, ..IRQS };
    assert!(refused(all(), other).contains("interrupts differ"));
}
