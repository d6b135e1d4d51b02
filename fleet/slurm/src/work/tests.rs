use std::os::unix::fs::MetadataExt;

use mediatord::fixture::{Served, one_card};

use super::*;

/// A daemon with a software card of 120 MiB to give.
fn served() -> (Served, Arguments, tempfile::TempDir) {
    let served = one_card("reserve_mib = 8\n");
    let folder = tempfile::tempdir().unwrap();
    let arguments = Arguments {
        socket: served.fixture.path("admin.sock"),
        sockets: served.fixture.path("."),
        ledger: folder.path().join("log/slurm.jsonl"),
        scontrol: "/bin/true".into(),
        chunk_mib: 2,
        patience_s: 1,
        ..Arguments::default()
    };
    (served, arguments.on(Some("n1")), folder)
}

fn job(id: u32, shards: u32, folder: &tempfile::TempDir) -> Job {
    // The user of these tests may give its files to itself only.
    let uid = fs::metadata(folder.path()).unwrap().uid();
    Job { id, uid, shards, gpu: Some("0".to_owned()) }
}

const VGPU: Given = Given { memory_mib: None, weight: None, class: None, cap: None, vgpu: true };

fn ledger(arguments: &Arguments) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(&arguments.ledger).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_job_has_a_vgpu_until_it_ends() {
    let (served, arguments, folder) = served();
    let job = job(7, 25, &folder);
    let variables = begin(&arguments, &VGPU, &job).unwrap();
    let socket = served.fixture.path("./slurm-7.sock");
    assert_eq!(variables, [(VGPU_VARIABLE.to_owned(), socket.display().to_string())]);
    assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
    // Another process of the job finds it.
    assert_eq!(begin(&arguments, &VGPU, &job).unwrap(), variables);
    let vm: api::Vm = served.client_get("/v1/vms/slurm-7");
    assert_eq!(vm.vram_mib, 30);
    note(&arguments, 7).unwrap();
    end(&arguments, 7).unwrap();
    assert!(!socket.exists() && held(&arguments).unwrap().is_empty());
    end(&arguments, 7).unwrap();
    let lines = ledger(&arguments);
    assert_eq!(lines.len(), 1);
    assert_eq!((&lines[0]["job"], &lines[0]["node"], &lines[0]["memory_mib"]), (&7.into(), &"n1".into(), &30.into()));
    assert_eq!((&lines[0]["kind"], &lines[0]["weight"]), (&"vgpu".into(), &25.into()));
}

#[test]
fn all_shards_of_a_card_can_be_handed_out_and_no_more() {
    let (_served, arguments, folder) = served();
    for id in 1..=4 {
        begin(&arguments, &VGPU, &job(id, 25, &folder)).unwrap();
    }
    let error = begin(&arguments, &VGPU, &job(5, 25, &folder)).unwrap_err();
    assert!(error.contains("expected at most 0: card `card0`"), "{error}");
    // A program has no card here.
    let error = begin(&arguments, &Given::new(), &job(5, 25, &folder)).unwrap_err();
    assert!(error.contains("no card number 0 for CUDA programs"), "{error}");
    assert_eq!(held(&arguments).unwrap(), [1, 2, 3, 4]);
}

#[test]
fn what_jobs_left_that_are_over_is_taken_back_and_nothing_else() {
    let (served, arguments, folder) = served();
    for id in 1..=3 {
        begin(&arguments, &VGPU, &job(id, 15, &folder)).unwrap();
    }
    served.fixture.daemon.add(config::VmSpec::new("slurm-mine", "card0", 16)).unwrap();
    assert_eq!(
        reconcile(&arguments, || Err("the controller is away".to_owned())).unwrap_err(),
        "the controller is away"
    );
    assert_eq!(held(&arguments).unwrap(), [1, 2, 3]);
    assert_eq!(reconcile(&arguments, || Ok(vec![2, 9])).unwrap(), [1, 3]);
    assert_eq!(held(&arguments).unwrap(), [2]);
    assert_eq!(ledger(&arguments).len(), 2);
    assert!(served.fixture.daemon.vm("slurm-mine").is_ok());
}

#[test]
fn a_daemon_that_is_away_is_told_of() {
    let (_served, mut arguments, folder) = served();
    arguments.socket = folder.path().join("none.sock");
    for error in [
        begin(&arguments, &VGPU, &job(1, 25, &folder)).unwrap_err(),
        end(&arguments, 1).unwrap_err(),
        reconcile(&arguments, || Ok(Vec::new())).unwrap_err(),
    ] {
        assert!(error.contains("no daemon answers at") && error.contains("start mediatord"), "{error}");
    }
}

#[test]
fn a_socket_that_is_none_is_not_given_away() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    fs::write(&path, "").unwrap();
    std::os::unix::fs::symlink(&path, folder.path().join("b")).unwrap();
    for name in ["a", "b"] {
        assert_eq!(hand_over(&folder.path().join(name), 0).unwrap_err().to_string(), "expected a socket");
    }
}

/// Looks by way of a client.
trait Get {
    fn client_get<T: serde::de::DeserializeOwned>(&self, path: &str) -> T;
}

impl Get for Served {
    fn client_get<T: serde::de::DeserializeOwned>(&self, path: &str) -> T {
        Client::new(self.fixture.path("admin.sock")).unwrap().get(path).unwrap()
    }
}
