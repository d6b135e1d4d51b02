//! Tests `vm save` and `vm restore`, with a guest connected to the VM's socket.

use super::*;
use mediatord::fixture::{copy, guest, one_card};
use rig::RemoteGuest;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

fn served() -> Served {
    let served = one_card("");
    let ran = ctl(&served, &["vm", "add", "a", "--card", "card0", "--vram-mib", "16"]);
    assert_eq!(ran.code, Code::Good, "{}", ran.err);
    served
}

fn good(served: &Served, arguments: &[&str]) -> String {
    let ran = ctl(served, arguments);
    assert_eq!(ran.code, Code::Good, "{arguments:?}: {}", ran.err);
    ran.out
}

#[test]
fn saved_vm_restores_on_same_card_and_on_another_daemon() {
    let (first, second) = (served(), served());
    let file = first.fixture.path("a.vm");
    let file = file.to_str().unwrap();
    let (mut driver, mut channel) = guest(&first, "a");
    copy(&mut driver, &mut channel);
    let out = good(&first, &["vm", "save", "a", file]);
    assert!(out.starts_with("VM a saved to ") && out.ends_with(" MiB\n"), "{out}");
    assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600, "readable only by its owner");
    // The VM still works.
    driver.wait(&channel);
    copy(&mut driver, &mut channel);
    driver.wait(&channel);

    // An existing file is not replaced without `--force`, and no temporary file is left behind.
    let refused = ctl(&first, &["vm", "save", "a", file]);
    assert_eq!(refused.code, Code::Conflict, "{}", refused.err);
    assert!(refused.err.contains("already exists"), "{}", refused.err);
    copy(&mut driver, &mut channel);
    good(&first, &["vm", "save", "a", file, "--force"]);
    let names = fs::read_dir(first.fixture.path(".")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().ends_with(".part")));

    // Restore the same VM while work is in flight.
    let out = good(&first, &["vm", "restore", "a", file]);
    assert!(out.starts_with("VM a continues from ") && out.contains(" on card0: "), "{out}");
    driver.wait(&channel);
    assert!(driver.faults.is_empty());
    // The log contains all steps, with their authors.
    let page = good(&first, &["--json", "events", "--vm", "a"]);
    let page: api::EventPage = serde_json::from_str(&page).unwrap();
    let all: Vec<_> = page.events.iter().filter(|event| event.kind != api::EventKind::Connected).collect();
    let kinds: Vec<_> = all.iter().map(|event| event.kind.name()).collect();
    assert_eq!(kinds, ["added", "saved", "saved", "restored"]);
    let [.., saved, restored] = all.as_slice() else { panic!("{all:?}") };
    assert!(saved.text.starts_with("saved, with ") && saved.text.ends_with(" MiB of memory"), "{saved:?}");
    assert!(restored.text.starts_with("continues from a saved VM with "), "{restored:?}");
    assert!(all[1..].iter().all(|event| event.author.kind == api::AuthorKind::Client && event.author.pid.is_some()));
    assert_eq!(restored.card.as_deref(), Some("card0"));
    // Restore on another daemon, for a new client.
    let fresh = RemoteGuest::connect(&second.fixture.path("a.sock"), 16 << 20).unwrap();
    let restored: api::Restored =
        serde_json::from_str(&good(&second, &["--json", "vm", "restore", "a", file])).unwrap();
    assert_eq!((restored.vm.as_str(), restored.card.as_str()), ("a", "card0"));
    drop(std::mem::replace(&mut driver.guest, fresh));
    driver.wait(&channel);
    copy(&mut driver, &mut channel);
    driver.wait(&channel);
    assert!(driver.faults.is_empty());
}

#[test]
fn invalid_saved_vm_is_rejected_and_vm_keeps_running() {
    let served = served();
    let path = |name: &str| served.fixture.path(name).to_str().unwrap().to_owned();
    let (mut driver, mut channel) = guest(&served, "a");
    copy(&mut driver, &mut channel);
    good(&served, &["vm", "save", "a", &path("a.vm")]);
    let saved = fs::read(path("a.vm")).unwrap();
    let mut edited = saved.clone();
    edited[saved.len() / 2] ^= 1;
    fs::write(path("edited.vm"), edited).unwrap();
    fs::write(path("cut.vm"), &saved[..saved.len() - 5]).unwrap();
    fs::write(path("long.vm"), [&saved[..], &vec![0; 9 << 20]].concat()).unwrap();
    let ran = ctl(&served, &["vm", "add", "b", "--card", "card0", "--vram-mib", "32"]);
    assert_eq!(ran.code, Code::Good, "{}", ran.err);
    for (vm, file, code, what) in [
        ("a", "edited.vm", Code::Conflict, "the checksum at byte"),
        ("a", "cut.vm", Code::Conflict, "it was truncated"),
        ("a", "long.vm", Code::Conflict, "bytes follow"),
        ("a", "m.toml", Code::Failed, "cannot be read"),
        ("b", "a.vm", Code::Conflict, "`vram_mib` = 16, but this VM has 32"),
        ("z", "a.vm", Code::NotFound, "there is no VM `z`"),
    ] {
        let ran = ctl(&served, &["vm", "restore", vm, &path(file)]);
        assert_eq!(ran.code, code, "{file}: {}", ran.err);
        assert!(ran.err.contains(what), "{file}: {}", ran.err);
        assert_eq!(ctl_at("/nonexistent/admin.sock", &["vm", "save", "a", &path("x")]).code, Code::Unreachable);
    }
    let refused = ctl(&served, &["vm", "save", "z", &path("z.vm")]);
    assert_eq!(refused.code, Code::NotFound, "{}", refused.err);
    assert!(!fs::exists(path("z.vm")).unwrap() && !fs::exists(path("x")).unwrap());
    driver.wait(&channel);
    copy(&mut driver, &mut channel);
    driver.wait(&channel);
}

#[test]
fn clients_that_go_in_the_middle_harm_nothing() {
    let served = served();
    let (mut driver, mut channel) = guest(&served, "a");
    for at in 0..20 {
        copy(&mut driver, &mut channel);
        let mut socket = UnixStream::connect(served.fixture.path("admin.sock")).unwrap();
        let request = if at % 2 == 0 {
            "POST /v1/vms/a/save HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".to_owned()
        } else {
            "POST /v1/vms/a/restore HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\nGPUMVMST".to_owned()
        };
        socket.write_all(request.as_bytes()).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(at % 5));
        drop(socket);
        driver.wait(&channel);
    }
    assert!(driver.faults.is_empty());
    good(&served, &["vm", "remove", "a"]);
}
