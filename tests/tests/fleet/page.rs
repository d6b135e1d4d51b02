//! Tests that the daemon's page in a browser shows the values of the API.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::{Debian, wait};

use crate::site::{Form, WAIT_TIMEOUT, json, start_node_with, start_up};

/// Environment variable with the folder for screenshots; `docs/images` updates the documentation's screenshots.
const SCREENSHOTS: &str = "GPU_MEDIATOR_SCREENSHOTS";
const ADDRESS: &str = "127.0.0.1:9470";
/// Name of a program.
const HOSTILE: &str = "<b>x";
const SOCKET: &str = "/run/n1/admin.sock";
/// Tenants and a VM with different settings.
const USERS: &str = "
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

/// A tag of a page, with its attributes.
type Tag = BTreeMap<String, String>;

/// Returns the tags of a serialized document that have an attribute.
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

/// Returns the values of the table rows, by user and column.
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

/// Returns the same values from the API, for all users of all cards.
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

/// Adds the values of one card's users.
fn add_expected(values: &mut BTreeMap<(String, String), String>, memory: &[Value], time: &[Value]) -> Result<()> {
    for user in memory {
        let name = user["vm"].as_str().context("a name")?.to_owned();
        for (label, key) in [
            ("on the card", "on_card_bytes"),
            ("guaranteed", "guarantee_bytes"),
            ("quota", "quota_bytes"),
            ("in host memory", "in_host_bytes"),
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

/// Saves a screenshot in the folder that the environment variable names, and checks the file.
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
    holds("training", 200)?;
    holds("notebook", 64)?;
    host.ok(&format!("mediatorctl --socket {SOCKET} tenant set notebook --weight 150"))?;

    // Entitlements and states change with the work, so page and API are read until they agree.
    let mut differing = String::new();
    let document = wait::until("the page to show what the API says", WAIT_TIMEOUT, || {
        let before = expected(host)?;
        let document = host.browse("--dump-dom", &format!("http://{ADDRESS}/"))?;
        // Both tenants always have work, and together have received more than half of the last second.
        let all = shown(&document);
        let received = all.iter().filter(|((_, label), _)| label == "received");
        let received: u32 = received.map(|(_, value)| value.parse().unwrap_or(0)).sum();
        let found: BTreeMap<_, _> = all.into_iter().filter(|((_, label), _)| label != "received").collect();
        differing = format!("received {received} of 1000, page {found:#?}\nAPI {before:#?}");
        Ok((received > 500 && before == found && before == expected(host)?).then_some(document))
    })
    .with_context(|| differing.clone())?;
    ensure!(document.contains("data-state=\"current\""), "the page is old: {document}");
    // The change of the weight is shown as an event, with its author.
    ensure!(document.contains("weight") && document.contains("notebook"), "{document}");

    screenshot(host, "page.png", "--window-size=1240,900")?;
    screenshot(host, "page-dark.png", "--window-size=1240,900 --blink-settings=preferredColorScheme=0")?;
    screenshot(host, "page-phone.png", "--window-size=390,900")?;

    // A program chooses its own name, which must not add elements to the page.
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
    host.stop("n1")
}
