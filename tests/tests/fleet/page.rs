//! Tests in a browser that the daemon's status page shows the API's values.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::{Debian, wait};

use crate::site::{Form, WAIT_TIMEOUT, json, start_node_with, start_up};

/// Environment variable with the folder for screenshots. Setting it to `docs/images` updates the screenshots in the
/// documentation.
const SCREENSHOTS: &str = "GPU_MEDIATOR_SCREENSHOTS";
const ADDRESS: &str = "127.0.0.1:9470";
/// A program name with markup.
const HOSTILE: &str = "<b>x";
const SOCKET: &str = "/run/n1/admin.sock";
/// Configuration keys of the software card, and tables of tenants and a VM with different settings. The card has host
/// memory and a slow bus, so that the page can show a move in progress.
const USERS: &str = "memory.host_mib = 64
time = { copy_mib_per_s = 1024, bus_mib_per_s = 4 }

[[tenant]]
name = \"training\"
card = \"h100\"
vram_mib = 600
memory = { quota_mib = 512, guarantee_mib = 256 }
time = { weight = 300 }

[[tenant]]
name = \"notebook\"
card = \"h100\"
vram_mib = 400

[[vm]]
name = \"desktop\"
card = \"soft\"
vram_mib = 32
";

/// The attributes of a tag.
type Tag = BTreeMap<String, String>;

/// Returns the tags of a serialized document that have the given attribute.
fn tags(document: &str, attribute: &str) -> Vec<Tag> {
    let mark = format!(" {attribute}=\"");
    let inside = document.split('<').map(|tag| tag.split('>').next().unwrap_or_default());
    inside
        .filter(|tag| tag.contains(&mark))
        .map(|tag| {
            let mut words = tag.split("=\"");
            let mut name = words.next().unwrap_or_default();
            let mut attributes = Tag::new();
            for word in words {
                let (value, next) = word.split_once('"').unwrap_or((word, ""));
                let key = name.rsplit(' ').next().unwrap_or_default();
                attributes.insert(key.to_owned(), value.replace("&lt;", "<").replace("&gt;", ">"));
                name = next;
            }
            attributes
        })
        .collect()
}

/// Returns the values in table rows, by user and column.
fn shown(document: &str) -> BTreeMap<(String, String), String> {
    let mut values = BTreeMap::new();
    for row in document.split("<tr ").skip(1) {
        let row = format!("<tr {}", row.split("</tr>").next().unwrap_or_default());
        let Some(user) = tags(&row, "data-user").pop() else { continue };
        for cell in tags(&row, "data-value") {
            values.insert((user["data-user"].clone(), cell["data-label"].clone()), cell["data-value"].clone());
        }
    }
    values
}

/// Returns the values that the page must show for all users of all cards, according to the API. See [`shown`].
fn expected(host: &Debian) -> Result<BTreeMap<(String, String), String>> {
    let list = |value: &Value, key: &str| value[key].as_array().cloned().unwrap_or_default();
    let mut values = BTreeMap::new();
    for card in ["h100", "soft"] {
        let memory = json(host, &format!("--socket {SOCKET} memory show {card}"))?;
        let time = json(host, &format!("--socket {SOCKET} sched show {card}"))?;
        add_expected(&mut values, &list(&memory, "vms"), &list(&time, "vms"))?;
    }
    Ok(values)
}

/// Inserts the expected values for the users of one card.
fn add_expected(values: &mut BTreeMap<(String, String), String>, memory: &[Value], time: &[Value]) -> Result<()> {
    for user in memory {
        let name = user["vm"].as_str().context("a name")?.to_owned();
        for (label, key) in [
            ("on the card", "on_card_bytes"),
            ("guaranteed", "guarantee_bytes"),
            ("quota", "quota_bytes"),
            ("in host memory", "in_host_bytes"),
            ("moves", "moving_bytes"),
            ("moved to host", "moved_out_bytes"),
            ("moved back", "moved_in_bytes"),
        ] {
            values.insert((name.clone(), label.to_owned()), user[key].to_string());
        }
    }
    for user in time {
        let name = user["vm"].as_str().context("a name")?.to_owned();
        values.insert((name.clone(), "weight".to_owned()), user["time"]["weight"].to_string());
        values.insert((name.clone(), "entitled".to_owned()), user["entitled_permille"].to_string());
        values.insert((name, String::new()), user["state"].as_str().context("a state")?.to_owned());
    }
    Ok(())
}

/// Returns the value that the page shows for a user in a column.
fn value(document: &str, user: &str, label: &str) -> Result<u64> {
    let values = shown(document);
    let value = values.get(&(user.to_owned(), label.to_owned()));
    value.with_context(|| format!("no {label} of {user}: {values:#?}"))?.parse().context("a number")
}

/// Checks that the page shows memory while it moves, and then shows the moved memory as reported by the API.
fn page_shows_moves(host: &Debian) -> Result<()> {
    let evict = format!("mediatorctl --socket {SOCKET} memory evict desktop --mib 8");
    host.start("moves", &format!("while :; do {evict}; sleep 0.5; done"))?;
    wait::until("memory to move on the page", WAIT_TIMEOUT, || {
        let document = host.browse("--dump-dom", &format!("http://{ADDRESS}/"))?;
        Ok((value(&document, "desktop", "moves")? > 0).then_some(()))
    })?;
    screenshot(host, "page-moves.png", "--window-size=1240,900")?;
    host.stop("moves")?;
    wait::until("the page to show all moves", WAIT_TIMEOUT, || {
        let document = host.browse("--dump-dom", &format!("http://{ADDRESS}/"))?;
        let memory = json(host, &format!("--socket {SOCKET} memory show soft"))?;
        let vm = &memory["vms"][0];
        ensure!(vm["vm"] == "desktop", "{memory:#}");
        let same = |label: &str, key: &str| anyhow::Ok(Some(value(&document, "desktop", label)?) == vm[key].as_u64());
        let all = same("moves", "moving_bytes")? && same("moved to host", "moved_out_bytes")?;
        Ok((all && same("moved back", "moved_in_bytes")? && value(&document, "desktop", "moved to host")? > 0)
            .then_some(()))
    })
}

/// Runs Prometheus' `promtool` on the metrics that the page's port serves for a daemon with tenants and a VM.
fn metrics_pass_promtool(host: &Debian) -> Result<()> {
    let document = host.browse("--dump-dom", &format!("http://{ADDRESS}/metrics"))?;
    let text = document.split_once("<pre").and_then(|(_, rest)| rest.split_once('>')).context("no text")?.1;
    let text = text.split("</pre>").next().unwrap_or_default();
    let mut metrics = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    metrics.push('\n');
    for name in
        ["gpu_mediator_tenant_used_seconds_total{", "gpu_mediator_vm_engine_seconds_total{", "gpu_mediator_moves_total"]
    {
        ensure!(metrics.contains(name), "no {name} in {metrics}");
    }
    let mut promtool = tests::monitoring()?.promtool()?;
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = promtool.spawn()?;
    child.stdin.take().context("no input")?.write_all(metrics.as_bytes())?;
    let output = child.wait_with_output()?;
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    ensure!(output.status.success() && said.is_empty(), "promtool: {}\n{said}", output.status);
    Ok(())
}

/// Returns the daemon's status as shown on the page.
fn daemon_on_page(document: &str) -> Result<Tag> {
    tags(document, "data-generation").pop().with_context(|| document.to_owned())
}

/// Upgrades the daemon while its users work, and checks that the page shows the upgrade as the API reports it.
fn page_shows_upgrade(host: &Debian) -> Result<()> {
    let document = host.browse("--dump-dom", &format!("http://{ADDRESS}/"))?;
    let before = daemon_on_page(&document)?;
    ensure!(before["data-generation"] == "1" && before["data-upgraded"].is_empty(), "{before:?}");
    host.ok(&format!("mediatorctl --socket {SOCKET} daemon upgrade"))?;
    let daemon = json(host, &format!("--socket {SOCKET} daemon show"))?;
    let document = host.browse("--dump-dom", &format!("http://{ADDRESS}/"))?;
    let after = daemon_on_page(&document)?;
    ensure!(after["data-generation"] == "2" && daemon["upgrades"] == 1, "{after:?}\n{daemon:#}");
    for (attribute, key) in [("data-version", "version"), ("data-upgraded", "upgraded_at")] {
        ensure!(daemon[key] == after[attribute].as_str() && !after[attribute].is_empty(), "{after:?}\n{daemon:#}");
    }
    let pid = daemon["pid"].to_string();
    ensure!(pid == after["data-pid"] && before["data-pid"] != after["data-pid"], "{after:?}");
    ensure!(document.contains("generation 2 · took over at ") && document.contains("VMs waited"), "{document}");
    Ok(())
}

/// Stops the current daemon, which is not the unit's main process after an upgrade.
fn end_daemon(host: &Debian) -> Result<()> {
    let daemon = json(host, &format!("--socket {SOCKET} daemon show"))?;
    let pid = daemon["pid"].as_u64().context("a process")?;
    host.ok(&format!("kill -TERM {pid}"))?;
    host.until("the daemon to exit", &format!("! kill -0 {pid} 2>/dev/null"), WAIT_TIMEOUT).map(drop)
}

/// Takes a screenshot, checks the file, and saves it in the folder that the environment variable names, if it is set.
fn screenshot(host: &Debian, name: &str, options: &str) -> Result<()> {
    host.browse(&format!("--screenshot=/tmp/{name} --hide-scrollbars {options}"), &format!("http://{ADDRESS}/"))?;
    let picture = host.browser_file(&format!("/tmp/{name}"))?;
    ensure!(picture.starts_with(b"\x89PNG") && picture.len() > 10_000, "{name} has {} bytes", picture.len());
    match std::env::var_os(SCREENSHOTS).map(PathBuf::from) {
        Some(folder) => fs::write(folder.join(name), picture).with_context(|| format!("{}", folder.display())),
        None => Ok(()),
    }
}

#[test]
fn page_in_browser_shows_what_the_api_says() -> Result<()> {
    let Some(host) = start_up("page", Form::Deb)? else { return Ok(()) };
    let host = &host;
    host.ok("ip link set lo up")?;
    start_node_with(host, "n1", &format!("page = \"{ADDRESS}\"\n"), USERS)?;
    host.install_browser()?;
    let card = "FAKE_CUDA_FOLDER=/run/n1/card FAKE_CUDA_MIB=1088 GPU_MEDIATOR_CUDA_DRIVER=/opt/fake/libcuda.so.1";
    for (tenant, mib) in [("training", 200), ("notebook", 64)] {
        let run = format!("exec env {card} mediatorctl --socket {SOCKET} run --tenant {tenant} --");
        host.start(
            tenant,
            &format!("mkfifo /run/{tenant}.in; {run} cuda-program hold --mib {mib} 0<>/run/{tenant}.in"),
        )?;
        host.start(&format!("{tenant}-busy"), &format!("{run} cuda-program busy --kernel-us 1000 --ms 600000"))?;
    }
    let holds = |tenant: &str, mib: u64| {
        wait::until(&format!("memory of {tenant}"), WAIT_TIMEOUT, || {
            let shown = json(host, &format!("--socket {SOCKET} tenant show {tenant}"))?;
            Ok((shown["on_card_bytes"].as_u64() >= Some(mib << 20)).then_some(()))
        })
    };
    // Start a guest that runs kernels continuously.
    host.start("desktop", "exec light-vmm /run/n1/desktop.sock 32 loop")?;
    let computes = "grep -q '^RESULT ok=true' /var/log/units/desktop.log";
    host.until("the guest to compute", computes, WAIT_TIMEOUT)?;
    holds("training", 200)?;
    holds("notebook", 64)?;
    host.ok(&format!("mediatorctl --socket {SOCKET} tenant set notebook --weight 150"))?;

    // Entitlements and states change with the work, so read the page and the API until they agree.
    let mut differing = String::new();
    let document = wait::until("the page to agree with the API", WAIT_TIMEOUT, || {
        let before = expected(host)?;
        let document = host.browse("--dump-dom", &format!("http://{ADDRESS}/"))?;
        // Both tenants always have work, and together have received more than half of the card time in the last second.
        // The guest also computes, on its own card.
        let all = shown(&document);
        let received_by = |users: &[&str]| -> u32 {
            let received =
                all.iter().filter(|((user, label), _)| label == "received" && users.contains(&user.as_str()));
            received.map(|(_, value)| value.parse().unwrap_or(0)).sum()
        };
        let (received, computed) = (received_by(&["training", "notebook"]), received_by(&["desktop"]));
        let found: BTreeMap<_, _> = all.into_iter().filter(|((_, label), _)| label != "received").collect();
        differing = format!("received {received} and {computed} of 1000, page {found:#?}\nAPI {before:#?}");
        Ok((received > 500 && computed > 0 && before == found && before == expected(host)?).then_some(document))
    })
    .with_context(|| differing.clone())?;
    ensure!(document.contains("data-state=\"current\""), "the page is old: {document}");
    // The weight change must appear as an event with its author.
    ensure!(document.contains("weight") && document.contains("notebook"), "{document}");

    screenshot(host, "page.png", "--window-size=1240,900")?;
    screenshot(host, "page-dark.png", "--window-size=1240,900 --blink-settings=preferredColorScheme=0")?;
    screenshot(host, "page-phone.png", "--window-size=390,900")?;

    metrics_pass_promtool(host)?;
    page_shows_moves(host)?;
    page_shows_upgrade(host)?;

    // A program chooses its own name, which must not inject elements into the page.
    let copy = format!("cp /usr/bin/cuda-program '/usr/bin/{HOSTILE}'");
    host.start(
        "hostile",
        &format!("{copy}; exec env {card} mediatorctl --socket {SOCKET} run --tenant notebook -- '{HOSTILE}' busy --kernel-us 1000 --ms 600000"),
    )?;
    wait::until("the program's name on the page", WAIT_TIMEOUT, || {
        let document = host.browse("--dump-dom", &format!("http://{ADDRESS}/"))?;
        ensure!(!document.contains(HOSTILE), "{document}");
        Ok(document.contains("&lt;b&gt;x").then_some(()))
    })?;
    end_daemon(host)
}
