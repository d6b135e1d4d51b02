//! Runs the commands of docs/guides/operating.md exactly as shown there.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use rig::RemoteGuest;
use rig::driver::{Channel, Driver, M2MF, PAGE, m2mf_copy, object};
use rustix::process::{Pid, Signal, kill_process};
use support::{DAEMON, Place, ctl};

const TEXT: &str = include_str!("../../../docs/guides/operating.md");
const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 256\nmemory = { host_mib = 256 }\n";
/// Programs that the commands need in addition to a shell and mediatorctl.
const TOOLS: [&str; 3] = ["curl", "jq", "python3"];

/// Returns the guide's code blocks that begin with the line `marked`.
fn blocks(marked: &str) -> Vec<&'static str> {
    TEXT.split(marked).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// VRAM size of the VM `web`, in MiB.
const WEB_MIB: u64 = 64;
/// Virtual address of the source buffer.
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;

/// Guest in the VM `web`.
struct Guest {
    driver: Driver<RemoteGuest>,
    channel: Channel,
    to: u64,
}

impl Guest {
    fn new(socket: &Path) -> Self {
        let mut driver = Driver::new(RemoteGuest::connect(socket, WEB_MIB << 20).unwrap());
        let channel = driver.channel(1);
        driver.buffer(&channel, FROM, 1, 1);
        let to = driver.buffer(&channel, TO, 1, 2);
        Self { driver, channel, to }
    }

    /// Copies data, and verifies the result.
    fn work(&mut self) {
        let Self { driver, channel, to } = self;
        driver.submit(channel, &[object(M2MF), m2mf_copy(FROM, TO, PAGE as u32)].concat());
        driver.wait(channel);
        assert!(driver.vram_holds(*to, 1, 1) && driver.faults.is_empty());
    }
}

#[test]
fn operating_guide_commands_work_as_documented() {
    let there =
        |tool: &str| Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    let missing: Vec<_> = TOOLS.into_iter().filter(|tool| !there(tool)).collect();
    let place = Place::with_state(CARD);
    // The guide's commands read the metrics on the read-only socket.
    let config = place.path("m.toml");
    let text = fs::read_to_string(&config).unwrap();
    let reader = format!("read_socket = {:?}\nsocket_dir", place.path("read.sock"));
    fs::write(&config, text.replacen("socket_dir", &reader, 1)).unwrap();
    let running = place.start(&mut place.daemon());
    let folder = place.path("").display().to_string();
    let folder = folder.trim_end_matches('/');
    let programs = ctl().parent().unwrap().display().to_string();
    let path = format!("{programs}:{}", std::env::var("PATH").unwrap());
    let mut ran = 0;
    let mut guest: Option<Guest> = None;
    for block in blocks("```sh\n") {
        if let Some(tool) = missing.iter().find(|tool| block.contains(**tool)) {
            println!("skipped because {tool} is missing:\n{block}");
            continue;
        }
        let script = block.replace("/run/gpu-mediator", folder);
        // TIMEOUT: stops a command that would wait forever. All blocks together take only seconds.
        let output = Command::new("timeout")
            .args(["120", "bash", "-e", "-o", "pipefail", "-c", &script])
            .current_dir(folder)
            .env("PATH", &path)
            .env("MEDIATORCTL_SOCKET", place.path("admin.sock"))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{block}\n{}{}", text(&output.stdout), text(&output.stderr));
        ran += 1;
        let socket = place.path("web.sock");
        if socket.exists() {
            guest.get_or_insert_with(|| Guest::new(&socket)).work();
        }
    }
    drop(guest);
    assert!(ran >= 3, "number of blocks that need no other tools: {ran}");
    let guarantee = place.ctl_json(&["export"])["vm"][0]["memory"]["guarantee_mib"].clone();
    assert!(!missing.is_empty() || guarantee == 64, "{guarantee}");
    let weight = place.ctl_json(&["export"])["vm"][1]["time"]["weight"].clone();
    assert_eq!(weight, if missing.is_empty() { 250 } else { 200 });
    assert!(
        missing.contains(&"curl") || fs::read_to_string(place.path("gpu-mediator.prom")).unwrap().contains("# TYPE")
    );
    running.end(Signal::TERM);
}

/// The last daemon process, which is not a child of the test after an upgrade. Killed at the end of the test.
struct Last<'a>(&'a Place);

impl Drop for Last<'_> {
    fn drop(&mut self) {
        let output = self.0.ctl(&["--json", "daemon", "show"]).stdout;
        let info: serde_json::Value = serde_json::from_slice(&output).unwrap_or_default();
        let number = info["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        if let Some(pid) = number {
            let _ended = kill_process(pid, Signal::KILL);
        }
    }
}

#[test]
fn maintenance_windows_go_as_the_page_says_under_guests_at_work() {
    if Command::new("jq").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("skipped because jq is missing");
        return;
    }
    let vm = |name: &str| format!("[[vm]]\nname = \"{name}\"\ncard = \"card0\"\nvram_mib = {WEB_MIB}\n");
    let place = Place::new(&format!("{CARD}{}{}{}", CARD.replace("card0", "card1"), vm("web"), vm("build")));
    for (from, to) in [(Path::new(DAEMON), "mediatord"), (Path::new(DAEMON), "new/mediatord")] {
        fs::create_dir_all(place.path(to).parent().unwrap()).unwrap();
        fs::copy(from, place.path(to)).unwrap();
    }
    let mut command = Command::new(place.path("mediatord"));
    let running = place.start(command.arg("--config").arg(place.path("m.toml")).env("MEDIATORD_LOG", "info"));
    let _last = Last(&place);
    let folder = place.path("");
    let folder = folder.to_str().unwrap().trim_end_matches('/');
    let path = format!("{}:{}", ctl().parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut guests = ["web", "build"].map(|vm| Guest::new(&place.path(&format!("{vm}.sock"))));
    let windows = blocks("```sh window\n");
    assert_eq!(windows.len(), 2);
    for block in windows {
        let config = format!("{folder}/m.toml");
        let script = block.replace("/usr/bin", folder).replace("/etc/gpu-mediator.toml", &config);
        let stop = AtomicBool::new(false);
        let output = std::thread::scope(|scope| {
            for guest in &mut guests {
                scope.spawn(|| {
                    while !stop.load(Ordering::Acquire) {
                        guest.work();
                    }
                });
            }
            // TIMEOUT: stops a command that would wait forever. A block of commands takes only seconds.
            let output = Command::new("timeout")
                .args(["120", "bash", "-e", "-o", "pipefail", "-c", &script])
                .current_dir(folder)
                .env("PATH", &path)
                .env("MEDIATORCTL_SOCKET", place.path("admin.sock"))
                .stdin(Stdio::null())
                .output();
            stop.store(true, Ordering::Release);
            output.unwrap()
        });
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{block}\n{}{}", text(&output.stdout), text(&output.stderr));
        guests.iter_mut().for_each(Guest::work);
    }
    let info = place.ctl_json(&["daemon", "show"]);
    assert_eq!((&info["upgrades"], &info["upgrade_failures"]), (&2.into(), &0.into()), "{info}");
    let metrics = get(&place, "/metrics");
    for sample in [
        "gpu_mediator_upgrades_total 2",
        "gpu_mediator_upgrade_failures_total 0",
        "gpu_mediator_upgrade_pause_seconds 0.",
        "gpu_mediator_moves_total{from=\"card0\",to=\"card1\"} 2",
        "gpu_mediator_moves_total{from=\"card1\",to=\"card0\"} 1",
        "gpu_mediator_move_failures_total 0",
        "gpu_mediator_move_pause_seconds 0.",
    ] {
        assert!(metrics.contains(sample), "{sample}\n{metrics}");
    }
    let log = fs::read_to_string(place.path("log")).unwrap();
    for event in [
        "the next daemon continues with all cards and VMs",
        "the VMs of the previous daemon continue",
        "the VM has moved",
    ] {
        assert!(log.contains(event), "{event}\n{log}");
    }
    drop(running);
}

/// Requests `path` on the admin socket, and returns the response body.
fn get(place: &Place, path: &str) -> String {
    let mut stream = UnixStream::connect(place.path("admin.sock")).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn quick_start_of_the_readme_prints_its_output() {
    let readme = include_str!("../../../README.md");
    let section = readme.split("## A virtual machine on the software card").nth(1).unwrap();
    let block = |kind: &str| section.split(kind).nth(1).unwrap().split("```").next().unwrap();
    let (build, script) = block("```sh\n").split_once('\n').unwrap();
    assert!(build.starts_with("cargo build"), "{build}");
    let folder = tempfile::tempdir().unwrap();
    let programs =
        [ctl().parent().unwrap(), Path::new(DAEMON).parent().unwrap()].map(|path| path.display().to_string());
    // The test itself builds the programs, chooses the directory, and stops the daemon.
    let script = script
        .replace("$PWD/target/release", &programs.join(":"))
        .replace("$(mktemp -d)", &folder.path().display().to_string())
        .replace("&\n", "2> \"$folder/log\" & trap 'kill %1; wait' EXIT\n");
    // TIMEOUT: only a failing test takes this long.
    let output =
        Command::new("timeout").args(["60", "bash", "-e", "-c", &script]).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).replace(&folder.path().display().to_string(), "FOLDER");
    let log = fs::read_to_string(folder.path().join("log")).unwrap_or_default();
    assert_eq!(text, block("```text\n"), "{}{log}", String::from_utf8_lossy(&output.stderr));
}
