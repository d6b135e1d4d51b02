//! Tests clients that connect, disconnect, hang or connect twice, and socket paths that are in use, stale or
//! inaccessible.

mod support;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;

use support::*;
use vmm_glue::client::{Client, ClientError, QEMU_CAPABILITIES, memory_file};
use vmm_glue::protocol::{Command, DmaUnmap, Header, RegionAccess};
use vmm_glue::server::Keeper;
use vmm_glue::socket::BindError;
use vmm_glue::{Link, RegionIndex, Server, ServerOptions, SocketOptions, StopHandle};
use zerocopy::IntoBytes;

#[test]
fn next_client_finds_a_clean_device() {
    let host = Host::start();
    let mut first = host.client();
    let file = memory_file(0x2000, true).unwrap();
    first.dma_map(0x1000, 0x2000, true, Some((file.as_fd(), 0))).unwrap();
    let _irqs = first.attach_irqs(1, 4).unwrap();
    first.write32(0, 0, 7).unwrap();
    assert_eq!(host.link.client().unwrap().pid, std::process::id().cast_signed());
    drop(first);
    host.wait_for(&Event::Unmap { gpa: 0x1000, size: 0x2000 });
    host.expect(Event::Disconnected);
    let mut second = host.client();
    assert_eq!(second.read32(0, 0).unwrap(), 0);
    assert!(host.link.memory().snapshot().regions().is_empty());
    assert_eq!(host.link.interrupts().msi_attached(), 0);
    assert_eq!(host.link.counters().clients.load(Relaxed), 2);
}

#[test]
fn second_client_is_rejected_at_once_and_first_continues() {
    let host = Host::start();
    let mut first = host.client();
    let mut second = Client::connect_silent(&host.path).unwrap();
    second.set_timeout(Some(EVENT_TIMEOUT)).unwrap();
    assert_eq!(second.negotiate(0, 1, QEMU_CAPABILITIES).unwrap_err().errno(), EBUSY);
    assert!(matches!(second.receive_message(), Err(ClientError::Closed)));
    assert_eq!(first.read32(0, 0).unwrap(), 0);
    assert_eq!(host.link.counters().clients_refused.load(Relaxed), 1);
    drop(first);
    host.wait_for(&Event::Disconnected);
    host.client().read32(0, 0).expect("the device is free again");
}

#[test]
fn second_client_that_floods_does_not_hold_up_the_first() {
    let host = Host::start();
    let mut first = host.client();
    let second = Client::connect_silent(&host.path).unwrap();
    let flood = std::thread::spawn(move || while second.send_raw(&[0; 4096], &[]).is_ok() {});
    for _ in 0..100 {
        assert_eq!(first.read32(0, 0).unwrap(), 0);
    }
    flood.join().unwrap();
}

#[test]
fn client_that_disconnects_without_a_word_is_no_client() {
    let host = Host::start();
    for _ in 0..20 {
        Client::connect_silent(&host.path).unwrap();
    }
    let mut client = host.client();
    assert_eq!(client.read32(0, 0).unwrap(), 0);
}

#[test]
fn silent_connections_do_not_keep_a_client_out() {
    let host = Host::start();
    let _silent: Vec<_> = (0..10).map(|_| Client::connect_silent(&host.path).unwrap()).collect();
    let mut client = host.client();
    assert_eq!(client.read32(0, 0).unwrap(), 0);
}

#[test]
fn unreading_client_is_disconnected_and_others_are_unaffected() {
    let options = ServerOptions { max_queued: 100_000, ..Default::default() };
    let host = Host::start_with(options, |_| ());
    let other = Host::start();
    let mut other_client = other.client();
    let mut client = host.client();
    let body = RegionAccess { offset: 0, region: 0, count: 0x1000 };
    // The client requests far more data than the server and the socket can buffer, and never reads the replies.
    let sent = (0..10_000).take_while(|_| client.send(Command::REGION_READ, 0, body.as_bytes(), &[]).is_ok()).count();
    assert!(sent < 10_000, "the server has closed the connection");
    host.wait_for(&Event::Disconnected);
    assert_eq!(host.link.counters().clients_dropped.load(Relaxed), 1);
    assert_eq!(other_client.read32(0, 0).unwrap(), 0);
    host.client().read32(0, 0).expect("the next client is served");
}

#[test]
fn client_stalled_mid_message_does_not_block_server_stop() {
    let host = Host::start();
    let client = host.client();
    let header = Header::request(1, Command::REGION_WRITE, 1000, 0);
    client.send_raw(&header.as_bytes()[..9], &[]).unwrap();
    host.stop.stop();
    host.wait_for(&Event::Disconnected);
}

#[test]
fn client_disconnecting_mid_message_is_dropped_cleanly() {
    let host = Host::start();
    let client = host.client();
    let header = Header::request(1, Command::REGION_WRITE, 1000, 0);
    client.send_raw(header.as_bytes(), &[]).unwrap();
    drop(client);
    host.expect(Event::Disconnected);
    host.client().read32(0, 0).unwrap();
}

#[test]
fn unframeable_streams_end_the_connection_only() {
    let host = Host::start();
    for size in [0, 15, u32::MAX] {
        let mut client = host.client();
        client.send_raw(Header::request(1, Command::REGION_READ, size, 0).as_bytes(), &[]).unwrap();
        assert!(matches!(client.receive_message(), Err(ClientError::Closed)));
        host.expect(Event::Disconnected);
    }
    assert_eq!(host.link.counters().clients_dropped.load(Relaxed), 3);
}

#[test]
fn first_message_must_be_a_version() {
    let host = Host::start();
    let mut client = Client::connect_silent(&host.path).unwrap();
    let error = client.request(Command::DEVICE_GET_INFO, &[0; 16], &[]).unwrap_err();
    assert_eq!(error.errno(), EINVAL);
    assert!(matches!(client.receive_message(), Err(ClientError::Closed)));
}

#[test]
fn wrong_version_is_refused_and_the_connection_closed() {
    let host = Host::start();
    let mut client = Client::connect_silent(&host.path).unwrap();
    assert_eq!(client.negotiate(7, 0, "{}").unwrap_err().errno(), EINVAL);
    assert!(matches!(client.receive_message(), Err(ClientError::Closed)));
    assert_eq!(host.client().read32(0, 0).unwrap(), 0);
}

#[test]
fn stop_ends_a_server_without_clients_and_one_that_is_flooded() {
    drop(Host::start());
    let host = Host::start();
    let mut client = host.client();
    let flood = std::thread::spawn(move || {
        while client.post(0, 0, &[1; 4]).is_ok() {}
        client
    });
    host.wait_for(&Event::Write(RegionIndex::Bar0, 0, vec![1; 4]));
    host.stop.stop();
    host.wait_for(&Event::Disconnected);
    assert!(matches!(flood.join().unwrap().receive_message(), Err(ClientError::Closed)));
}

#[test]
fn client_reads_end_of_connection_despite_pending_messages() {
    let (let_go, held) = std::sync::mpsc::channel();
    let host = Host::start_with(ServerOptions::default(), |device| device.held_unmap = Some(held));
    let mut client = host.client();
    client.dma_map(0x1000, 0x1000, true, None).unwrap();
    let unmap = DmaUnmap { argsz: 24, flags: 0, address: 0x1000, size: 0x1000 };
    client.send(Command::DMA_UNMAP, 0, unmap.as_bytes(), &[]).unwrap();
    host.wait_for(&Event::Unmap { gpa: 0x1000, size: 0x1000 });
    for _ in 0..100 {
        client.post(0, 0, &[1; 4]).unwrap();
    }
    host.link.disconnect();
    let_go.send(()).unwrap();
    // Unread messages are not executed.
    host.expect(Event::Disconnected);
    assert_eq!(
        client.receive_message().unwrap().header.command,
        Command::DMA_UNMAP.0,
        "messages that were read get replies"
    );
    assert!(matches!(client.receive_message(), Err(ClientError::Closed)));
}

/// Sends the test a copy of each stored connection, and `None` for each release.
#[derive(Debug)]
struct Copies(Sender<Option<OwnedFd>>);

impl Keeper for Copies {
    fn keep(&self, connection: BorrowedFd<'_>) {
        self.0.send(Some(connection.try_clone_to_owned().unwrap())).unwrap();
    }

    fn release(&self) {
        self.0.send(None).unwrap();
    }
}

#[test]
fn copy_of_a_connection_does_not_hide_its_end() {
    let (sender, copies) = std::sync::mpsc::channel();
    let host = Host::kept_by(std::sync::Arc::new(Copies(sender)));
    // A connection that sends no data is not a client.
    let _silent = Client::connect_silent(&host.path).unwrap();
    let mut client = host.client();
    let copy = copies.recv_timeout(EVENT_TIMEOUT).unwrap().expect("the connection is stored first");
    host.link.disconnect();
    assert!(matches!(client.receive_message(), Err(ClientError::Closed)));
    assert!(copies.recv_timeout(EVENT_TIMEOUT).unwrap().is_none());
    drop(copy);
    drop(host);
    assert!(copies.try_recv().is_err(), "no other descriptor was stored");
}

#[test]
fn operator_can_disconnect_a_client() {
    let host = Host::start();
    let mut client = host.client();
    host.link.disconnect();
    host.expect(Event::Disconnected);
    assert!(client.read32(0, 0).is_err());
    assert_eq!(host.link.client(), None);
    host.client().read32(0, 0).unwrap();
}

fn bind(path: &Path) -> Result<Server, BindError> {
    Server::bind(path, &SocketOptions::default(), ServerOptions::default())
}

#[test]
fn path_of_a_running_server_is_refused_and_names_its_process() {
    let host = Host::start();
    let error = bind(&host.path).unwrap_err();
    assert!(matches!(error, BindError::InUse { .. }));
    let text = error.to_string();
    assert!(text.contains(&format!("process {}", std::process::id())) && text.contains("device.sock"), "{text}");
    host.client().read32(0, 0).expect("the running server is not disturbed");
}

#[test]
fn stale_socket_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("stale.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    bind(&path).unwrap();
}

#[test]
fn socket_file_is_removed_with_server_unless_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("it.sock");
    drop(bind(&path).unwrap());
    assert!(!path.exists());
    let server = bind(&path).unwrap();
    std::fs::rename(&path, directory.path().join("kept.sock")).unwrap();
    std::fs::write(&path, "not a socket").unwrap();
    drop(server);
    assert!(path.exists());
}

#[test]
fn mode_and_group_are_set() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("it.sock");
    let gid = rustix::process::getegid().as_raw();
    let options = SocketOptions { mode: Some(0o660), uid: None, gid: Some(gid) };
    let _server = Server::bind(&path, &options, ServerOptions::default()).unwrap();
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((metadata.permissions().mode() & 0o777, metadata.gid()), (0o660, gid));
}

#[test]
fn bad_socket_paths_are_rejected_with_reason() {
    let directory = tempfile::tempdir().unwrap();
    let missing = bind(&directory.path().join("missing/it.sock")).unwrap_err();
    assert!(matches!(missing, BindError::NoDirectory { .. }), "{missing}");
    let long = bind(&directory.path().join("x".repeat(120))).unwrap_err();
    assert!(matches!(long, BindError::TooLong { .. }), "{long}");
    let file = directory.path().join("file");
    std::fs::write(&file, "data").unwrap();
    let taken = bind(&file).unwrap_err();
    assert!(matches!(taken, BindError::NotASocket { .. }), "{taken}");
    assert_eq!(std::fs::read(&file).unwrap(), b"data");
}

#[test]
fn socket_that_listens_already_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("activated.sock");
    let server = Server::from_listener(UnixListener::bind(&path).unwrap(), ServerOptions::default()).unwrap();
    let (link, stop) = (Link::new(IRQS).unwrap(), StopHandle::new().unwrap());
    let thread = std::thread::spawn({
        let stop = stop.clone();
        move || server.run(&link, &mut vmm_glue::echo::EchoDevice::new(4096, 0x1234, 0x5678), &stop).unwrap()
    });
    let mut client = Client::connect(&path).unwrap();
    assert_eq!(client.read32(7, 0).unwrap(), 0x5678_1234);
    stop.stop();
    thread.join().unwrap();
    assert!(path.exists(), "the path belongs to the process that created it");
}

#[test]
fn socket_of_an_earlier_process_is_adopted_with_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let options = SocketOptions { mode: Some(0o600), ..SocketOptions::default() };
    let (listener, bound) = vmm_glue::socket::bind(&path, &options).unwrap();
    bound.leave();
    assert!(path.exists(), "left to the next process");
    let adopted = vmm_glue::socket::adopt(&listener).unwrap();
    assert_eq!(adopted.path(), path);
    adopted.set_rights(&SocketOptions { mode: Some(0o640), ..options }).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    drop(adopted);
    assert!(!path.exists());
    assert!(vmm_glue::socket::adopt(&listener).is_none(), "the socket no longer has a path");
}
