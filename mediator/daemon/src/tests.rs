//! Tests of the daemon's core over real sockets, with a card that serves plain memory.

use super::fixture::{BAR0, CHECK, FakeOpener, Fixture, PANIC, Released, config, eventually, start};
use super::*;
use api::{ErrorCode, VmState};
use config::SocketMode;
use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use vmm_glue::client::{CLOUD_HYPERVISOR_CAPABILITIES, Client, memory_file};

#[test]
fn added_vm_serves_its_socket_with_the_rights_asked_for() {
    let fixture = Fixture::new();
    let vm = fixture.daemon.add(VmSpec { mode: SocketMode(0o640), ..VmSpec::new("a", "card0", 64) }).unwrap();
    assert_eq!((vm.state, vm.socket.as_deref()), (VmState::Waiting, Some(&*fixture.path("a.sock"))));
    let mode = std::fs::metadata(fixture.path("a.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);

    let mut client = fixture.connect("a");
    client.write32(BAR0, 8, 0x1234_5678).unwrap();
    assert_eq!(client.read32(BAR0, 8).unwrap(), 0x1234_5678);
    assert_eq!(fixture.state("a"), VmState::Connected);
    let vm = fixture.daemon.vm("a").unwrap();
    assert_eq!(vm.client.map(|client| client.pid), i32::try_from(std::process::id()).ok());
    assert_eq!((vm.transport["region_reads"], vm.transport["messages_region_write"]), (1, 1));

    drop(client);
    eventually("the VM waits again", || fixture.state("a") == VmState::Waiting);
}

#[test]
fn xen_vm_without_xen_host_is_rejected_and_leaves_no_socket() {
    if std::path::Path::new("/dev/xen/privcmd").exists() {
        return;
    }
    let fixture = Fixture::new();
    let spec = VmSpec { xen_domain: Some("guest".to_owned()), ..VmSpec::new("a", "card0", 64) };
    let error = fixture.daemon.add(spec).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("/dev/xen/privcmd") && text.contains("xen-privcmd"), "{text}");
    assert!(matches!(fixture.daemon.vm("a"), Err(DaemonError::NoVm(_))));
    assert!(!fixture.path("a.sock").exists());
    fixture.daemon.add(VmSpec::new("a", "card0", 64)).unwrap();
}

#[test]
fn removed_vm_loses_client_and_socket_and_other_vms_continue() {
    let fixture = Fixture::new();
    fixture.daemon.add(VmSpec::new("a", "card0", 64)).unwrap();
    fixture.daemon.add(VmSpec::new("b", "card0", 64)).unwrap();
    let (mut a, mut b) = (fixture.connect("a"), fixture.connect("b"));

    fixture.daemon.remove("a").unwrap();

    assert!(a.read32(BAR0, 0).is_err(), "the connection is closed");
    assert!(!fixture.path("a.sock").exists());
    assert_eq!(*fixture.released.lock(), ["a"]);
    assert!(matches!(fixture.daemon.vm("a"), Err(DaemonError::NoVm(_))));
    b.write32(BAR0, 0, 5).unwrap();
    assert_eq!(b.read32(BAR0, 0).unwrap(), 5);

    fixture.daemon.add(VmSpec::new("a", "card0", 64)).unwrap();
    assert_eq!(fixture.connect("a").read32(BAR0, 0).unwrap(), 0);
}

#[test]
fn panic_in_one_device_fails_that_vm_only() {
    let fixture = Fixture::new();
    fixture.daemon.add(VmSpec::new("a", "card0", 64)).unwrap();
    fixture.daemon.add(VmSpec::new("b", "card0", 64)).unwrap();
    let (mut a, mut b) = (fixture.connect("a"), fixture.connect("b"));

    assert!(a.write32(BAR0, PANIC, 1).is_err());

    eventually("the VM has failed", || fixture.state("a") == VmState::Failed);
    let error = fixture.daemon.vm("a").unwrap().error.unwrap();
    assert!(error.contains("as requested by the test"), "{error}");
    b.write32(BAR0, 0, 5).unwrap();
    assert_eq!(b.read32(BAR0, 0).unwrap(), 5);
    fixture.daemon.remove("a").unwrap();
    assert_eq!(*fixture.released.lock(), ["a"]);
}

#[test]
fn private_client_memory_is_reported_until_next_client() {
    let fixture = Fixture::new();
    fixture.daemon.add(VmSpec::new("a", "card0", 64)).unwrap();
    let mut client = Client::connect_as(&fixture.path("a.sock"), CLOUD_HYPERVISOR_CAPABILITIES).unwrap();
    let file = memory_file(0x10_0000, false).unwrap();
    client.dma_map(0, 0x10_0000, true, Some((std::os::fd::AsFd::as_fd(&file), 0))).unwrap();
    client.write32(BAR0, CHECK, 1).unwrap();
    eventually("the unshared memory is detected", || fixture.daemon.vm("a").unwrap().memory_not_shared);

    drop(client);
    eventually("the VM waits again", || fixture.state("a") == VmState::Waiting);
    assert!(fixture.daemon.vm("a").unwrap().memory_not_shared, "the operator can still see why the guest failed");
    let mut client = fixture.connect("a");
    client.read32(BAR0, 0).unwrap();
    assert!(!fixture.daemon.vm("a").unwrap().memory_not_shared);
}

#[test]
fn socket_in_use_is_refused_and_the_name_stays_free() {
    let fixture = Fixture::new();
    let other = UnixListener::bind(fixture.path("a.sock")).unwrap();
    let error = fixture.daemon.add(VmSpec::new("a", "card0", 64)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Conflict);
    assert!(error.to_string().contains("a.sock is in use"), "{error}");
    assert!(fixture.daemon.vms().is_empty());

    // No process listens on this socket, so the daemon replaces it.
    drop(other);
    assert!(fixture.path("a.sock").exists());
    fixture.daemon.add(VmSpec::new("a", "card0", 64)).unwrap();
    fixture.connect("a").read32(BAR0, 0).unwrap();
}

#[test]
fn socket_in_a_missing_folder_is_refused_with_its_path() {
    let fixture = Fixture::new();
    let spec = VmSpec { socket: Some(fixture.path("missing/a.sock")), ..VmSpec::new("a", "card0", 64) };
    let error = fixture.daemon.add(spec).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Invalid);
    assert!(error.to_string().contains("missing does not exist"), "{error}");
}

#[test]
fn file_that_is_no_socket_is_left_alone() {
    let fixture = Fixture::new();
    std::fs::write(fixture.path("a.sock"), "precious").unwrap();
    let error = fixture.daemon.add(VmSpec::new("a", "card0", 64)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Conflict);
    assert_eq!(std::fs::read_to_string(fixture.path("a.sock")).unwrap(), "precious");
}

#[test]
fn requests_against_the_card_are_refused_by_kind() {
    let fixture = Fixture::new();
    fixture.daemon.add(VmSpec::new("a", "card0", 256)).unwrap();
    let code = |spec| fixture.daemon.add(spec).unwrap_err().code();
    assert_eq!(code(VmSpec::new("a", "card1", 64)), ErrorCode::Conflict);
    assert_eq!(code(VmSpec::new("b", "card0", 256)), ErrorCode::Quota);
    assert_eq!(code(VmSpec::new("b", "card9", 64)), ErrorCode::NotFound);
    assert_eq!(code(VmSpec::new("b/", "card0", 64)), ErrorCode::Invalid);
    assert_eq!(code(VmSpec { group: Some("no-such".to_owned()), ..VmSpec::new("b", "card0", 64) }), ErrorCode::Invalid);
    assert_eq!(code(VmSpec { passthrough: true, vram_mib: None, ..VmSpec::new("b", "card0", 0) }), ErrorCode::Conflict);
    assert_eq!(code(VmSpec::new("greedy", "card0", 64)), ErrorCode::Quota);
    assert!(!fixture.path("greedy.sock").exists());
    assert_eq!(fixture.daemon.remove("b").unwrap_err().code(), ErrorCode::NotFound);

    let card = fixture.daemon.card("card0").unwrap();
    assert_eq!((card.vram_assigned_mib, card.vram_free_mib, card.channels_used), (256, 224, 3));
    assert_eq!(card.vms, ["a"]);
    assert_eq!(fixture.daemon.card("card1").unwrap().vram_free_mib, 400, "not more than the card has");
}

#[test]
fn shut_down_removes_everything_and_takes_nothing_new() {
    let fixture = Fixture::new();
    fixture.daemon.add(VmSpec::new("a", "card0", 64)).unwrap();
    fixture.daemon.add(VmSpec::new("b", "card1", 64)).unwrap();
    let _connected = fixture.connect("b");
    fixture.daemon.shut_down();
    assert!(!fixture.path("a.sock").exists() && !fixture.path("b.sock").exists());
    assert_eq!(*fixture.released.lock(), ["a", "b"]);
    assert!(matches!(fixture.daemon.add(VmSpec::new("c", "card0", 64)), Err(DaemonError::ShuttingDown)));
}

#[test]
fn card_that_does_not_open_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = start(config(folder.path(), &["broken"]), &FakeOpener(Released::default()), HashMap::new());
    let error = error.err().unwrap().to_string();
    assert_eq!(error, "card `broken` cannot be opened: it does not respond");
}

#[test]
fn vm_that_does_not_start_takes_the_others_down() {
    let folder = tempfile::tempdir().unwrap();
    let released = Released::default();
    let mut config = config(folder.path(), &["card0"]);
    config.vms = vec![VmSpec::new("a", "card0", 64), VmSpec::new("greedy", "card0", 64)];
    let error = start(config, &FakeOpener(Arc::clone(&released)), HashMap::new()).err().unwrap();
    assert_eq!(error.to_string(), "VM `greedy`: the card has no memory left");
    assert_eq!(*released.lock(), ["a"]);
    assert!(!folder.path().join("a.sock").exists());
}

#[test]
fn socket_from_the_service_manager_is_used_and_kept() {
    let fixture = Fixture::with_listeners(|folder| {
        HashMap::from([("a".to_owned(), UnixListener::bind(folder.join("theirs")).unwrap())])
    });
    for round in 1..3 {
        let vm = fixture.daemon.add(VmSpec::new("a", "card0", 64)).unwrap();
        assert_eq!(vm.socket, None);
        let mut client = Client::connect(&fixture.path("theirs")).unwrap();
        client.write32(BAR0, 0, round).unwrap();
        assert_eq!(client.read32(BAR0, 0).unwrap(), round);
        assert!(!fixture.path("a.sock").exists());
        fixture.daemon.remove("a").unwrap();
    }
    assert!(fixture.path("theirs").exists());
}

#[test]
fn missing_host_card_error_names_remedy() {
    let text = "[[card]]\nname = \"gtx\"\nkind = \"vfio\"\naddress = \"fffffff0:65:00.0\"\n";
    let card = ::config::Config::parse(text, "f").unwrap().cards.remove(0);
    let error = super::backend::OpenCard::open(&super::cards::Cards::default(), &card).err().unwrap();
    assert_eq!(
        error.to_string(),
        "the host has no PCI function fffffff0:65:00.0; see `mediatorctl card list --host` for the host's cards"
    );
}
