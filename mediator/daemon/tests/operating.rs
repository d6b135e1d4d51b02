//! The commands of docs/operating.md, run as they stand there.

mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rig::RemoteGuest;
use rig::driver::{Channel, Driver, M2MF, PAGE, m2mf_copy, object};
use rustix::process::Signal;
use support::{Place, ctl};

const TEXT: &str = include_str!("../../../docs/operating.md");
const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 256\nmemory = { host_mib = 256 }\n";
/// Programs that the commands need beside a shell and mediatorctl.
const TOOLS: [&str; 3] = ["curl", "jq", "python3"];

/// The blocks that are marked as shell.
fn blocks() -> Vec<&'static str> {
    TEXT.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// MiB of VRAM of the VM `web`, and where its buffers lie.
const WEB_MIB: u64 = 64;
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;

/// The guest that works in the VM `web`.
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

    /// Copies, and looks whether all is there.
    fn work(&mut self) {
        let Self { driver, channel, to } = self;
        driver.submit(channel, &[object(M2MF), m2mf_copy(FROM, TO, PAGE as u32)].concat());
        driver.wait(channel);
        assert!(driver.vram_holds(*to, 1, 1) && driver.faults.is_empty());
    }
}

#[test]
fn commands_of_the_page_do_what_it_says() {
    let there =
        |tool: &str| Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    let missing: Vec<_> = TOOLS.into_iter().filter(|tool| !there(tool)).collect();
    let place = Place::with_state(CARD);
    // The page reads the metrics on the read-only socket.
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
    for block in blocks() {
        if let Some(tool) = missing.iter().find(|tool| block.contains(**tool)) {
            println!("skipped, for want of {tool}:\n{block}");
            continue;
        }
        let script = block.replace("/run/gpu-mediator", folder);
        // TIMEOUT: for what waits in vain; all blocks together take seconds.
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
    assert!(ran >= 3, "the blocks without other tools: {ran}");
    let guarantee = place.ctl_json(&["export"])["vm"][0]["memory"]["guarantee_mib"].clone();
    assert!(!missing.is_empty() || guarantee == 64, "{guarantee}");
    let weight = place.ctl_json(&["export"])["vm"][1]["time"]["weight"].clone();
    assert_eq!(weight, if missing.is_empty() { 250 } else { 200 });
    assert!(
        missing.contains(&"curl") || fs::read_to_string(place.path("gpu-mediator.prom")).unwrap().contains("# TYPE")
    );
    running.end(Signal::TERM);
}
