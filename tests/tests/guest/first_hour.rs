//! An operator's first hour, following only the documentation: from the package to two VMs and two tenants on the
//! status page.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use images::libraries;
use serde_json::Value;
use tests::Host;
use tests::daemon::binary;
use tests::files::Files;
use tests::pages::blocks;
use tests::wait::Scratch;

use crate::service::package;

/// Text of the operator's guide.
const PAGE: &str = include_str!("../../../docs/guides/operating.md");
/// Path of the host's curl, which the guide's commands use.
const CURL: &str = "/usr/bin/curl";
/// Address of the status page.
const ADDRESS: &str = "http://127.0.0.1:9470";
/// Settings of the fake driver, which needs no GPU.
const CARD: &str = "FAKE_CUDA_FOLDER=/run/gpu-mediator/card FAKE_CUDA_MIB=1088";
/// Time limit of commands and waits. It only detects hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// Adds curl to the guest's files. Copies this machine's libraries to a separate folder, so that they do not replace
/// the guest's libraries.
fn add_curl(files: &mut Files) -> Result<()> {
    files.copy(Path::new(CURL), "opt/curl/curl", 0o755)?;
    let mut loader = None;
    for library in libraries::list(&mut Command::new(CURL))? {
        files.copy(&library.path, &format!("opt/curl/{}", library.file_name()), 0o755)?;
        loader = loader.or(library.is_loader.then(|| library.file_name().to_owned()));
    }
    let loader = loader.context("curl has no loader")?;
    let program = format!("#!/bin/sh\nexec /opt/curl/{loader} --library-path /opt/curl /opt/curl/curl \"$@\"\n");
    files.write("usr/bin/curl", 0o755, program.as_bytes());
    Ok(())
}

/// Runs a command, and parses its standard output.
fn json(host: &Host, command: &str) -> Result<Value> {
    let text = host.vm().run_within(&format!("sh {command}"), LIMIT)?.success().context(command.to_owned())?.text();
    serde_json::from_str(&text).with_context(|| format!("{command}:\n{text}"))
}

/// Returns the status page's response for an API path.
fn shown(host: &Host, path: &str) -> Result<Value> {
    json(host, &format!("curl --silent --show-error --fail {ADDRESS}/{path}"))
}

/// Checks that the status page shows both VMs, with the same values as `mediatorctl`.
fn page_shows_both_vms(host: &Host) -> Result<()> {
    for (path, arguments) in [
        ("v1/vms", "vm list"),
        ("v1/cards", "card list"),
        ("v1/cards/card0/memory", "memory show card0"),
        ("v1/cards/card0/scheduler", "sched show card0"),
    ] {
        let (page, tool) = (shown(host, path)?, json(host, &format!("mediatorctl --json {arguments}"))?);
        ensure!(page.is_object() && page == tool, "{path}: {page:#}\n{arguments}: {tool:#}");
    }
    let vms = shown(host, "v1/vms")?;
    let names: Vec<_> = vms["vms"].as_array().context("a list")?.iter().map(|vm| &vm["name"]).collect();
    ensure!(names == ["alice", "bob"], "{vms:#}");
    // The status page requests these two paths, and those of the cards above.
    let memory = shown(host, "v1/memory")?.to_string();
    let time = shown(host, "v1/schedulers")?.to_string();
    for name in ["alice", "bob"] {
        let mark = format!("\"vm\":\"{name}\"");
        ensure!(memory.contains(&mark) && time.contains(&mark), "{name}:\n{memory}\n{time}");
    }
    let events = shown(host, "v1/events?limit=100")?.to_string();
    ensure!(events.contains("alice") && events.contains("bob"), "{events}");
    Ok(())
}

/// Installs the fake driver in place of NVIDIA's, and creates the folder that represents its card.
fn install_driver(host: &Host) -> Result<()> {
    let libraries = "/usr/lib/x86_64-linux-gnu";
    for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        host.ok(&format!("cp /root/fake.so {libraries}/{name}"))?;
    }
    let card = "install --directory --owner=gpu-mediator --group=gpu-mediator /run/gpu-mediator/card";
    let lines = format!("[Service]\\nEnvironment={CARD}\\n");
    let folder = "/etc/systemd/system/gpu-mediator.service.d";
    host.ok(&format!("ldconfig; {card} && mkdir -p {folder} && printf '{lines}' > {folder}/fake.conf")).map(drop)
}

/// Checks that the page shows both tenants with the same values as `mediatorctl`, and the memory of one tenant's
/// program.
fn page_shows_both_tenants(host: &Host) -> Result<()> {
    let user = "setpriv --reuid=gpu-mediator --regid=gpu-mediator --clear-groups";
    let run = "mediatorctl run --tenant training -- cuda-program hold --mib 64";
    host.ok(&format!(
        "mkfifo /root/in; (exec env {CARD} {user} {run} 0<>/root/in >/root/hold.log 2>&1) & sleep 1; cat /root/hold.log"
    ))?;
    let held = format!("mediatorctl --json tenant show training | grep '\"on_card_bytes\": {}'", 64 << 20);
    host.until("the program to hold memory", &held, LIMIT).with_context(|| "see /root/hold.log".to_owned())?;
    let tenants = shown(host, "v1/tenants")?;
    let names: Vec<_> = tenants["tenants"].as_array().context("a list")?.iter().map(|one| &one["name"]).collect();
    ensure!(names == ["serving", "training"], "{tenants:#}");
    ensure!(tenants["tenants"][1]["programs"][0]["name"] == "cuda-program", "{tenants:#}");
    for (path, arguments) in [("v1/cards/gpu/memory", "memory show gpu"), ("v1/vms", "vm list")] {
        let (page, tool) = (shown(host, path)?, json(host, &format!("mediatorctl --json {arguments}"))?);
        ensure!(page.is_object() && page == tool, "{path}: {page:#}\n{arguments}: {tool:#}");
    }
    let time = shown(host, "v1/schedulers")?.to_string();
    ensure!(time.contains("\"vm\":\"training\"") && time.contains("\"vm\":\"serving\""), "{time}");
    let events = shown(host, "v1/events?limit=100")?.to_string();
    ensure!(events.contains("training") && events.contains("serving"), "{events}");
    Ok(())
}

#[test]
fn first_hour_ends_with_vms_and_tenants_on_the_page() -> Result<()> {
    ensure!(Path::new(CURL).exists(), "{CURL} is missing; install the package curl");
    let [commands] = &blocks(PAGE, "sh first-hour")[..] else { bail!("the page does not have exactly one first hour") };
    let [tenants] = &blocks(PAGE, "sh first-hour-tenants")[..] else {
        bail!("the page does not have exactly one block of tenants")
    };
    let scratch = Scratch::new("first-hour")?;
    let mut files = Files::default();
    let name = format!("root/gpu-mediator_{}_amd64.deb", env!("CARGO_PKG_VERSION"));
    files.copy(&package(scratch.path(), &["--fast"])?, &name, 0o644)?;
    add_curl(&mut files)?;
    files.write("root/first-hour.sh", 0o644, commands.as_bytes());
    files.write("root/tenants.sh", 0o644, tenants.as_bytes());
    files.copy(&binary("cuda-program")?, "usr/bin/cuda-program", 0o755)?;
    files.copy(&binary("libcuda_fake.so")?, "root/fake.so", 0o755)?;
    let host = Host::boot("first-hour", files)?;
    let said = host.ok("cd /root && sh -e first-hour.sh")?;
    ensure!(said.contains("<title>") && said.contains("bob    card0"), "{said}");
    page_shows_both_vms(&host)?;

    install_driver(&host)?;
    let said = host.ok("cd /root && sh -e tenants.sh")?;
    ensure!(said.contains("training") && said.contains("serving"), "{said}");
    page_shows_both_tenants(&host)?;

    // The status page is read-only, is served only on this host, and needs no further permission.
    let code = |arguments: &str| {
        host.ok(&format!("curl --silent --output /dev/null --write-out '%{{http_code}}' {arguments} {ADDRESS}/v1/vms"))
    };
    ensure!(code("--request POST")? == "403", "the page accepts a change");
    ensure!(code("--header 'Host: gpu.example.org'")? == "421", "the page answers another site");
    ensure!(
        host.sh("curl --silent --interface 127.0.0.1 http://192.0.2.1:9470/")?.code != 0,
        "another address answers"
    );

    // Without the drop-in, the service must not start, and its log must refer to the drop-in.
    host.ok("rm /etc/systemd/system/gpu-mediator.service.d/page.conf && systemctl daemon-reload")?;
    ensure!(host.sh("systemctl restart gpu-mediator")?.code != 0, "the page is served without a network");
    let journal = host.ok("journalctl --no-pager --unit=gpu-mediator --lines=20 --output=cat")?;
    ensure!(journal.contains("the service needs the drop-in page.conf"), "{journal}");
    Ok(())
}
