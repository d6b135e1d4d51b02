//! Runs `mediatorctl` within the test process, against a daemon with software cards.

use super::*;
use crate::client::Client;
use api::VmState;
use mediatord::fixture::Served;

mod codes;
mod desired;
mod events;
mod firmware;
mod host;
mod moving;
mod profile;
mod reference;
mod saving;
mod sched;

/// Output and exit code of one run.
struct Ran {
    code: Code,
    out: String,
    err: String,
}

/// Creates clients of a test daemon.
trait HasClient {
    fn client(&self) -> Client;
}

impl HasClient for Served {
    fn client(&self) -> Client {
        Client::new(self.fixture.path("admin.sock")).unwrap()
    }
}

fn ctl(served: &Served, arguments: &[&str]) -> Ran {
    ctl_at(&served.fixture.path("admin.sock").display().to_string(), arguments)
}

fn ctl_at(socket: &str, arguments: &[&str]) -> Ran {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let all: Vec<_> = ["mediatorctl", "--socket", socket].iter().chain(arguments).copied().collect();
    let code = run(all, &mut out, &mut err);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code, out: text(out), err: text(err) }
}

fn added(served: &Served, name: &str) {
    let ran = ctl(served, &["vm", "add", name, "--card", "card0", "--vram-mib", "64"]);
    assert_eq!(ran.code, Code::Good, "{}", ran.err);
}

#[test]
fn ctl_tables_show_vms_and_cards() {
    let served = Served::new();
    assert_eq!(ctl(&served, &["vm", "list"]).out, "no VMs\n");
    let ran = ctl(&served, &["vm", "add", "a", "--card", "card0", "--vram-mib", "64", "--channels", "8"]);
    assert!(ran.out.starts_with("VM a added: card card0, 64 MiB, socket /"), "{}", ran.out);

    let list = ctl(&served, &["vm", "list"]).out;
    let mut lines = list.lines();
    let head = lines.next().unwrap();
    assert_eq!(
        head.split("  ").map(str::trim).filter(|name| !name.is_empty()).collect::<Vec<_>>(),
        ["NAME", "CARD", "MODE", "STATE", "VRAM MIB", "CHANNELS", "DENIED", "SOCKET"]
    );
    let cells: Vec<_> = lines.next().unwrap().split_whitespace().collect();
    let socket = served.fixture.path("a.sock").display().to_string();
    assert_eq!(cells, ["a", "card0", "mediated", "waiting", "64", "3/8", "6", &*socket]);

    let shown = ctl(&served, &["vm", "show", "a"]).out;
    for text in ["PFB.THING", "0x100000", "unknown register", "doorbells", "10de:06d8"] {
        assert!(shown.contains(text), "{text}\n{shown}");
    }
    let cards = ctl(&served, &["card", "show"]).out;
    assert!(cards.lines().nth(1).unwrap().starts_with("card0"), "{cards}");
    assert!(ctl(&served, &["card", "show", "card1"]).out.contains("512 MiB"));
    assert_eq!(ctl(&served, &["vm", "remove", "a"]).out, "VM a removed\n");
}

#[test]
fn json_is_the_api_s_answer() {
    let served = Served::new();
    added(&served, "a");
    let json = |arguments: &[&str]| {
        let ran = ctl(&served, &[&["--output", "json"], arguments].concat());
        assert_eq!((ran.code, &*ran.err), (Code::Good, ""));
        ran.out
    };
    let list: api::VmList = serde_json::from_str(&json(&["vm", "list"])).unwrap();
    assert_eq!(list.vms.len(), 1);
    let vm: api::Vm = serde_json::from_str(&json(&["vm", "show", "a"])).unwrap();
    assert_eq!((vm.state, vm.denied.len()), (VmState::Waiting, 2));
    let cards: api::CardList = serde_json::from_str(&json(&["card", "show"])).unwrap();
    assert_eq!(cards.cards.len(), 2);
    let card: api::Card = serde_json::from_str(&json(&["card", "show", "card0"])).unwrap();
    assert_eq!(card.vms, ["a"]);
    let args: api::LaunchArgs = serde_json::from_str(&json(&["vm", "launch-args", "a"])).unwrap();
    assert_eq!(args.vmm, "qemu");
    let vm: api::Vm = serde_json::from_str(&json(&["vm", "add", "b", "--card", "card1", "--passthrough"])).unwrap();
    assert_eq!(vm.mode, api::VmMode::Passthrough);
    let removed: serde_json::Value = serde_json::from_str(&json(&["vm", "remove", "a"])).unwrap();
    assert_eq!(removed["removed"], "a");
}

#[test]
fn lists_as_yaml_csv_and_wide_tables_agree_with_json() {
    let served = Served::new();
    added(&served, "a");
    added(&served, "b");
    let out = |form: &str, arguments: &[&str]| {
        let ran = ctl(&served, &[&["-o", form], arguments].concat());
        assert_eq!((ran.code, &*ran.err), (Code::Good, ""), "{form}");
        ran.out
    };
    let list: api::VmList = serde_json::from_str(&out("json", &["vm", "list"])).unwrap();
    let yaml: api::VmList = serde_saphyr::from_str(&out("yaml", &["vm", "list"])).unwrap();
    assert_eq!(list, yaml);
    let text = out("csv", &["vm", "list"]);
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let names = reader.headers().unwrap().clone();
    let rows: Vec<_> = reader.records().map(|row| row.unwrap()).collect();
    let column = |wanted: &str| names.iter().position(|name| name == wanted).unwrap();
    assert_eq!(rows.iter().map(|row| &row[column("name")]).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(rows[0][column("ram.quota_bytes")], list.vms[0].ram.quota_bytes.to_string());
    let (table, wide) = (out("table", &["vm", "list"]), out("wide", &["vm", "list"]));
    for (narrow, wide) in table.lines().zip(wide.lines()) {
        assert!(wide.split_whitespace().count() > narrow.split_whitespace().count(), "{narrow}\n{wide}");
    }
    assert!(out("wide", &["card", "show"]).contains("UUID") && !out("table", &["card", "show"]).contains("UUID"));
    let ran = ctl(&served, &["-o", "yaml", "vm", "show", "c"]);
    let error: api::Error = serde_saphyr::from_str(&ran.err).unwrap();
    assert_eq!((ran.code, error.code), (Code::NotFound, ErrorCode::NotFound));
}

#[test]
fn launch_args_print_one_line_for_a_shell_and_comments() {
    let served = Served::new();
    added(&served, "a");
    let out = ctl(&served, &["vm", "launch-args", "a", "--memory", "1G"]).out;
    let (first, notes) = out.split_once('\n').unwrap();
    assert!(first.starts_with("-m 1G -object memory-backend-memfd,"), "{out}");
    assert!(notes.lines().all(|line| line.starts_with("# ")), "{out}");
    let out = ctl(&served, &["vm", "launch-args", "a", "--vmm", "cloud-hypervisor"]).out;
    assert!(out.starts_with("--memory size=2G,shared=on --user-device socket=/"), "{out}");
}

#[test]
fn exit_codes_distinguish_failures() {
    let served = Served::new();
    added(&served, "a");
    let code = |arguments: &[&str]| ctl(&served, arguments).code;
    let add = |name, card, mib| code(&["vm", "add", name, "--card", card, "--vram-mib", mib]);
    assert_eq!(code(&["vm", "show", "b"]), Code::NotFound);
    assert_eq!(code(&["vm", "show", "../cards"]), Code::NotFound);
    assert_eq!(code(&["vm", "remove", "b"]), Code::NotFound);
    assert_eq!(code(&["vm", "launch-args", "b"]), Code::NotFound);
    assert_eq!(code(&["card", "show", "b"]), Code::NotFound);
    assert_eq!(add("b", "card9", "64"), Code::NotFound);
    assert_eq!(add("a", "card0", "64"), Code::Conflict);
    assert_eq!(add("b", "card0", "4096"), Code::Conflict);
    assert_eq!(add("b", "card0", "63"), Code::Usage);
    assert_eq!(add("b b", "card0", "64"), Code::Usage);
    assert_eq!(add("b", "card0", "lots"), Code::Usage);
    assert_eq!(code(&["vm", "add", "b", "--card", "card0"]), Code::Usage);
    assert_eq!(code(&["vm", "add", "b", "--card", "card1", "--vram-mib", "64", "--passthrough"]), Code::Usage);
    assert_eq!(code(&["vm", "launch-args", "a", "--memory", "much"]), Code::Usage);
    assert_eq!(code(&["vm", "launch-args", "a", "--vmm", "bochs"]), Code::Usage);
    assert_eq!(code(&["frobnicate"]), Code::Usage);
    assert_eq!(code(&["--help"]), Code::Good);
    assert_eq!(code(&["vm", "list"]), Code::Good);
}

#[test]
fn errors_go_to_standard_error_with_advice_or_as_json() {
    let served = Served::new();
    let ran = ctl(&served, &["vm", "show", "b"]);
    assert_eq!(
        (&*ran.out, &*ran.err),
        ("", "mediatorctl: there is no VM `b`\n  see `mediatorctl vm list` for the names\n")
    );
    let ran = ctl(&served, &["--output", "json", "vm", "show", "b"]);
    let error: api::Error = serde_json::from_str(&ran.err).unwrap();
    assert_eq!((ran.code, error.code), (Code::NotFound, ErrorCode::NotFound));
}

#[test]
fn usage_error_is_json_if_asked_for() {
    let cases: [&[&str]; 4] = [
        &["--json", "vm", "add", "b"],
        &["vm", "list", "--output", "json", "--frobnicate"],
        &["--output=json", "frobnicate"],
        &["memory", "set-quota", "a", "much", "--json"],
    ];
    for arguments in cases {
        let ran = ctl_at("/nonexistent", arguments);
        let error: api::Error = serde_json::from_str(&ran.err).unwrap();
        assert_eq!((ran.code, error.code, &*ran.out), (Code::Usage, ErrorCode::Invalid, ""));
        assert!(!error.error.is_empty() && !error.what_to_do.is_empty(), "{error:?}");
    }
    // Options after `--` belong to the program, not to mediatorctl.
    let ran = ctl_at("/nonexistent", &["run", "--", "program", "--json"]);
    assert!(ran.err.starts_with("error: the following required arguments"), "{}", ran.err);
}

#[test]
fn missing_daemon_error_names_socket() {
    let ran = ctl_at("/nonexistent/admin.sock", &["vm", "list"]);
    assert_eq!(ran.code, Code::Unreachable);
    assert!(ran.err.contains("no daemon responds at /nonexistent/admin.sock"), "{}", ran.err);
    assert!(ran.err.contains("start mediatord"), "{}", ran.err);
}

#[test]
fn ctl_when_socket_is_not_mediatord_fails() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-what\r\n").unwrap();
    });
    let ran = ctl_at(&path.display().to_string(), &["vm", "list"]);
    assert_eq!(ran.code, Code::Failed);
    assert!(ran.err.contains("check that --socket is the admin socket of a mediatord"), "{}", ran.err);
    other.join().unwrap();
}
