//! The commands of docs/operating.md, run as they stand there.

mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use support::{CTL, Place};

const PAGE: &str = include_str!("../../docs/operating.md");
const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 256\n";
/// What the commands need beside a shell and mediatorctl.
const TOOLS: [&str; 3] = ["curl", "jq", "python3"];

/// The blocks that are marked as shell.
fn blocks() -> Vec<&'static str> {
    PAGE.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

#[test]
fn commands_of_the_page_do_what_it_says() {
    let there =
        |tool: &str| Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    let missing: Vec<_> = TOOLS.into_iter().filter(|tool| !there(tool)).collect();
    let place = Place::with_state(CARD);
    let running = place.start(&mut place.daemon());
    let folder = place.path("").display().to_string();
    let folder = folder.trim_end_matches('/');
    let programs = Path::new(CTL).parent().unwrap().display();
    let path = format!("{programs}:{}", std::env::var("PATH").unwrap());
    let mut ran = 0;
    for block in blocks() {
        if let Some(tool) = missing.iter().find(|tool| block.contains(**tool)) {
            println!("skipped, for want of {tool}:\n{block}");
            continue;
        }
        let script = block.replace("/run/gpu-mediator", folder);
        let output = Command::new("bash")
            .args(["-e", "-o", "pipefail", "-c", &script])
            .current_dir(folder)
            .env("PATH", &path)
            .env("MEDIATORCTL_SOCKET", place.path("admin.sock"))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{block}\n{}{}", text(&output.stdout), text(&output.stderr));
        ran += 1;
    }
    assert!(ran >= 3, "the blocks without other tools: {ran}");
    let weight = place.ctl_json(&["export"])["vm"][1]["time"]["weight"].clone();
    assert_eq!(weight, if missing.is_empty() { 250 } else { 200 });
    assert!(
        missing.contains(&"curl") || fs::read_to_string(place.path("gpu-mediator.prom")).unwrap().contains("# TYPE")
    );
    running.end(Signal::TERM);
}
