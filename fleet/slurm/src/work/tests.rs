use std::os::unix::fs::{MetadataExt, PermissionsExt};

use mediatord::fixture::{Served, one_card};

use super::*;

/// Starts a daemon with a software card that has 120 MiB of memory for tenants.
fn served() -> (Served, Arguments, tempfile::TempDir) {
    let served = one_card("reserve_mib = 8\n");
    let folder = tempfile::tempdir().unwrap();
    let script = format!("#!/bin/sh\n[ \"$1\" != --details ] || exec cat {}/$4\n", folder.path().display());
    fs::write(folder.path().join("scontrol"), script).unwrap();
    fs::set_permissions(folder.path().join("scontrol"), fs::Permissions::from_mode(0o700)).unwrap();
    let arguments = Arguments {
        socket: served.fixture.path("admin.sock"),
        sockets: served.fixture.path(""),
        ledger: folder.path().join("log/slurm.jsonl"),
        scontrol: folder.path().join("scontrol"),
        chunk_mib: 2,
        patience_s: 1,
        ..Arguments::default()
    };
    (served, arguments.on(Some("n1")), folder)
}

/// Creates a job with shards, and the file from which the fake controller reads it.
fn job(id: u32, shards: u32, folder: &tempfile::TempDir) -> Job {
    let text = format!("JobId={id} JobName=x\n     Nodes=n1 CPU_IDs=0 Mem=0 GRES=shard:{shards}({shards}/100)\n");
    fs::write(folder.path().join(id.to_string()), text).unwrap();
    // The user running these tests cannot change the owner of files, so the job belongs to this user.
    let uid = fs::metadata(folder.path()).unwrap().uid();
    Job { id, uid, of_array: None }
}

const VGPU: Given =
    Given { memory_mib: None, weight: None, class: None, cap: None, vgpu: true, share_group: None, sharing: None };

fn ledger(arguments: &Arguments) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(&arguments.ledger).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_job_has_a_vgpu_until_it_ends() {
    let (served, arguments, folder) = served();
    let job = job(7, 25, &folder);
    let variables = begin(&arguments, &VGPU, &job).unwrap();
    let socket = served.fixture.path("slurm-7/vgpu.sock");
    assert_eq!(variables, [(VGPU_VARIABLE.to_owned(), socket.display().to_string())]);
    assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
    // Another process of the job finds the existing vGPU.
    assert_eq!(begin(&arguments, &VGPU, &job).unwrap(), variables);
    let vm: api::Vm = served.client_get("/v1/vms/slurm-7");
    assert_eq!(vm.vram_mib, 30);
    note(&arguments, 7).unwrap();
    end(&arguments, 7).unwrap();
    assert!(!socket.parent().unwrap().exists() && held(&arguments).unwrap().is_empty());
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
    // The card on this node does not serve CUDA programs.
    let error = begin(&arguments, &Given::new(), &job(5, 25, &folder)).unwrap_err();
    assert!(error.contains("no card number 0 for CUDA programs"), "{error}");
    assert_eq!(held(&arguments).unwrap(), [1, 2, 3, 4]);
}

#[test]
fn only_shares_of_finished_jobs_are_reclaimed() {
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
fn missing_daemon_is_reported() {
    let (_served, mut arguments, folder) = served();
    arguments.socket = folder.path().join("none.sock");
    for error in [
        begin(&arguments, &VGPU, &job(1, 25, &folder)).unwrap_err(),
        end(&arguments, 1).unwrap_err(),
        reconcile(&arguments, || Ok(Vec::new())).unwrap_err(),
    ] {
        assert!(error.contains("no daemon responds at") && error.contains("start mediatord"), "{error}");
    }
}

#[test]
fn a_socket_elsewhere_is_not_given_away() {
    let (served, mut arguments, folder) = served();
    let there = job(7, 25, &folder);
    begin(&arguments, &VGPU, &there).unwrap();
    // The socket that the daemon reports must be in the configured folder.
    arguments.sockets = served.fixture.path("other");
    let error = begin(&arguments, &VGPU, &there).unwrap_err();
    assert!(error.contains("it is not in the folder") && error.contains("plugstack.conf"), "{error}");
}

#[test]
fn job_without_shards_gets_nothing_and_its_options_fail() {
    let (_served, arguments, folder) = served();
    let none = job(7, 0, &folder);
    assert_eq!(begin(&arguments, &Given::new(), &none), Ok(Vec::new()));
    assert!(begin(&arguments, &VGPU, &none).unwrap_err().contains("request some with --gres=shard:N"));
    assert_eq!(held(&arguments).unwrap(), Vec::<u32>::new());
}

#[test]
fn a_ledger_that_is_a_link_or_has_two_names_is_not_opened() {
    let folder = tempfile::tempdir().unwrap();
    let (victim, ledger) = (folder.path().join("victim"), folder.path().join("log/slurm.jsonl"));
    fs::write(&victim, "theirs").unwrap();
    fs::create_dir(folder.path().join("log")).unwrap();
    std::os::unix::fs::symlink(&victim, &ledger).unwrap();
    assert!(opened(&ledger).is_err());
    fs::remove_file(&ledger).unwrap();
    fs::hard_link(&victim, &ledger).unwrap();
    assert!(opened(&ledger).is_err());
    assert_eq!(fs::read_to_string(&victim).unwrap(), "theirs");
    fs::remove_file(&ledger).unwrap();
    opened(&ledger).unwrap();
}

#[test]
fn job_whose_usage_cannot_be_recorded_keeps_its_share() {
    let (_served, arguments, folder) = served();
    begin(&arguments, &VGPU, &job(7, 25, &folder)).unwrap();
    fs::create_dir_all(&arguments.ledger).unwrap();
    let error = end(&arguments, 7).unwrap_err();
    assert!(error.contains("slurm.jsonl"), "{error}");
    assert_eq!(held(&arguments).unwrap(), [7]);
    fs::remove_dir(&arguments.ledger).unwrap();
    end(&arguments, 7).unwrap();
    assert_eq!((held(&arguments).unwrap(), ledger(&arguments).len()), (Vec::new(), 1));
}

/// Simplifies GET requests.
trait Get {
    fn client_get<T: serde::de::DeserializeOwned>(&self, path: &str) -> T;
}

impl Get for Served {
    fn client_get<T: serde::de::DeserializeOwned>(&self, path: &str) -> T {
        Client::new(self.fixture.path("admin.sock")).unwrap().get(path).unwrap()
    }
}
