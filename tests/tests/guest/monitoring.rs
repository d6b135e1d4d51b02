//! Tests that Debian's Prometheus monitors a daemon with working VMs through the proxy described in
//! docs/guides/operating.md.

use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rig::RemoteGuest;
use rig::driver::{Channel, Driver, M2MF, PAGE, m2mf_copy, object};
use serde_json::Value;
use tests::guest::{card_toml, vm_toml};
use tests::wait::{self, Scratch};
use tests::{Daemon, http};

const PAGE_OF_OPERATORS: &str = include_str!("../../../docs/guides/operating.md");
/// Placeholder in the guide for the proxy's address.
const PORT: &str = "127.0.0.1:9401";
/// Placeholder in the guide for the daemon's folder.
const FOLDER: &str = "/run/gpu-mediator";
/// Folder of the package's alert rules, as stated in the guide.
const RULES_FOLDER: &str = "/usr/share/gpu-mediator/prometheus";
/// Parts of the names of metrics that have no samples in this test, so that their dashboard panels are empty.
const OTHER_METRICS: [&str; 4] =
    ["_tenant_", "_owner_restarts_", "_moves_total", "gpu_mediator_vm_wait_seconds_bucket"];
/// Additional settings of the card: host memory for evicted chunks.
const MEMORY: &str = "overcommit = true\nmemory = { host_mib = 128 }\n";
const VMS: [&str; 2] = ["web", "build"];
const VM_MIB: u32 = 32;
/// Time limit for a server to respond, and for Prometheus to read all metrics.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// GPU virtual address of the source buffer.
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;

/// A server, which is killed on drop.
struct Server(Child);

impl Server {
    fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let log = fs::File::create(log)?;
        let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn();
        Ok(Self(child.with_context(|| format!("cannot start {command:?}"))?))
    }

    /// Waits until `path` is served on `port`.
    fn wait_ready(&mut self, port: u16, path: &str) -> Result<()> {
        wait::until(&format!("{path} at port {port}"), ANSWER_TIMEOUT, || {
            if let Some(status) = self.0.try_wait()? {
                bail!("it has exited ({status})");
            }
            let answer = connect(port).and_then(|stream| http::get(stream, path));
            Ok(answer.is_ok().then_some(()))
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns an unused port.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

fn connect(port: u16) -> Result<TcpStream> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    Ok(stream)
}

/// Returns the code block in `language` from the guide.
fn block(language: &str) -> Result<&'static str> {
    let begin = format!("```{language}\n");
    let mut blocks = PAGE_OF_OPERATORS.split(begin.as_str()).skip(1);
    let block = blocks.next().and_then(|rest| rest.split("```").next());
    ensure!(blocks.next().is_none(), "two blocks of {language}");
    block.with_context(|| format!("no block of {language}"))
}

/// Returns Prometheus' current samples for `query`.
fn query(port: u16, query: &str) -> Result<Vec<Value>> {
    let escaped: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let answer = http::get(connect(port)?, &format!("/api/v1/query?query={escaped}"))?;
    let answer: Value = serde_json::from_str(&answer)?;
    ensure!(answer["status"] == "success", "{query}: {answer}");
    Ok(answer["data"]["result"].as_array().cloned().unwrap_or_default())
}

/// Returns the value of the only sample for the query `of`, or `None` if Prometheus does not have it yet.
fn value(port: u16, of: &str) -> Result<Option<f64>> {
    let samples = query(port, of)?;
    ensure!(samples.len() < 2, "{of}: {samples:?}");
    let value = samples.first().and_then(|sample| sample["value"][1].as_str());
    value.map(|value| value.parse().with_context(|| of.to_owned())).transpose()
}

/// Connects a guest to each VM, and copies data in it.
fn guests(daemon: &Daemon) -> Result<Vec<(Driver<RemoteGuest>, Channel)>> {
    let guest = |name: &&str| -> Result<_> {
        let guest = RemoteGuest::connect(&daemon.vm_socket(name), u64::from(VM_MIB) << 20)?;
        let mut driver = Driver::new(guest);
        let mut channel = driver.channel(1);
        driver.buffer(&channel, FROM, 1, 1);
        let to = driver.buffer(&channel, TO, 1, 2);
        driver.submit(&mut channel, &[object(M2MF), m2mf_copy(FROM, TO, PAGE as u32)].concat());
        driver.wait(&channel);
        ensure!(driver.vram_holds(to, 1, 1) && driver.faults.is_empty(), "VM {name}");
        Ok((driver, channel))
    };
    VMS.iter().map(guest).collect()
}

/// Returns queries and their expected results, which are taken from the output of `mediatorctl`.
fn expected(daemon: &Daemon) -> Result<Vec<(String, f64)>> {
    let memory = daemon.ctl_json(&["memory", "show", "card0"])?;
    let number = |value: &Value| value.as_f64().with_context(|| format!("no number in {memory}"));
    let mut expected = vec![
        ("gpu_mediator_host_memory_used_bytes{card=\"card0\"}".to_owned(), number(&memory["host_used_bytes"])?),
        ("gpu_mediator_host_memory_budget_bytes{card=\"card0\"}".to_owned(), number(&memory["host_budget_bytes"])?),
        ("gpu_mediator_card_memory_spare_bytes{card=\"card0\"}".to_owned(), number(&memory["spare_bytes"])?),
    ];
    for vm in memory["vms"].as_array().context("no VMs")? {
        let name = vm["vm"].as_str().context("no name")?;
        let mut say = |metric: &str, more: &str, key: &str, unit: f64| -> Result<()> {
            let query = format!("gpu_mediator_vm_{metric}{{vm=\"{name}\",card=\"card0\"{more}}}");
            expected.push((query, number(&vm[key])? / unit));
            Ok(())
        };
        for (place, key) in [
            ("card", "on_card_bytes"),
            ("reserve", "in_reserve_bytes"),
            ("host", "in_host_bytes"),
            ("unbacked", "unbacked_bytes"),
        ] {
            say("memory_bytes", &format!(",place={place:?}"), key, 1.0)?;
        }
        for (metric, key) in
            [("quota", "quota_bytes"), ("guarantee", "guarantee_bytes"), ("entitled", "entitled_bytes")]
        {
            say(&format!("memory_{metric}_bytes"), "", key, 1.0)?;
        }
        say("memory_moved_bytes_total", ",to=\"host\"", "moved_out_bytes", 1.0)?;
        say("suspended_seconds_count", "", "relocations", 1.0)?;
        say("suspended_seconds_sum", "", "suspended_ns", 1e9)?;
    }
    let time = daemon.ctl_json(&["sched", "show", "card0"])?;
    for vm in time["vms"].as_array().context("no VMs")? {
        let name = vm["vm"].as_str().context("no name")?;
        let query = format!("gpu_mediator_vm_submissions_completed_total{{vm={name:?},engine=\"compute\"}}");
        expected.push((query, number(&vm["engines"]["compute"]["completed"])?));
    }
    Ok(expected)
}

/// Returns the queries of the package's dashboards, with the dashboards' variables substituted.
fn dashboard_queries(packaging: &Path) -> Result<Vec<String>> {
    let mut queries = Vec::new();
    for entry in fs::read_dir(packaging.join("grafana"))? {
        let path = entry?.path();
        let board: Value =
            serde_json::from_str(&fs::read_to_string(&path)?).with_context(|| path.display().to_string())?;
        let panels = board["panels"].as_array().context("no panels")?;
        for target in panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten()) {
            let mut query = target["expr"].as_str().context("no query")?.replace("$__rate_interval", "1m");
            for variable in board["templating"]["list"].as_array().into_iter().flatten() {
                query = query.replace(&format!("${}", variable["name"].as_str().context("no name")?), ".*");
            }
            ensure!(!query.contains('$'), "{}: a variable is not declared: {query}", path.display());
            queries.push(query);
        }
    }
    Ok(queries)
}

/// Returns the names of Prometheus' pending and firing alerts.
fn alerts(port: u16) -> Result<Vec<String>> {
    let answer: Value = serde_json::from_str(&http::get(connect(port)?, "/api/v1/alerts")?)?;
    let alerts = answer["data"]["alerts"].as_array().with_context(|| answer.to_string())?;
    alerts.iter().map(|alert| Ok(alert["labels"]["alertname"].as_str().context("no name")?.to_owned())).collect()
}

#[test]
fn prometheus_through_documented_proxy_matches_mediatorctl() -> Result<()> {
    let programs = tests::monitoring()?;
    let vms: String = VMS.iter().map(|name| vm_toml(name, VM_MIB)).collect();
    let mut daemon = Daemon::start("monitoring", |paths| card_toml(paths, 128) + MEMORY + &vms)?;
    let guests = guests(&daemon)?;
    // Set a quota that keeps some of the VM's memory evicted to the host.
    daemon.ctl(&["memory", "set-quota", "web", "2"])?.success()?;
    wait::until("memory of VM web in the host", ANSWER_TIMEOUT, || {
        let memory = daemon.ctl_json(&["memory", "show", "card0"])?;
        let web = memory["vms"].as_array().and_then(|vms| vms.iter().find(|vm| vm["vm"] == "web")).cloned();
        let web = web.context("no VM web")?;
        let over = web["on_card_bytes"].as_u64() > web["quota_bytes"].as_u64();
        Ok((!over && web["in_host_bytes"].as_u64() > Some(0)).then_some(()))
    })?;

    let scratch = Scratch::new("prometheus")?;
    let path = |name: &str| scratch.path().join(name);
    let (proxy_port, port) = (free_port()?, free_port()?);
    let adapted = |text: &str| {
        text.replace(PORT, &format!("127.0.0.1:{proxy_port}"))
            .replace(FOLDER, &daemon.paths().folder.display().to_string())
    };
    fs::write(path("gpu-mediator.conf"), adapted(block("nginx")?))?;
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
    let rules = packaging.join("prometheus");
    let config = adapted(block("yaml")?);
    ensure!(config.contains(RULES_FOLDER), "no rules in {config}");
    // Evaluate alerts more often than by default. Otherwise, the test would have to wait for a minute.
    let config = "global: { evaluation_interval: 1s }\n".to_owned() + &config;
    fs::write(path("prometheus.yml"), config.replace(RULES_FOLDER, &rules.display().to_string()))?;
    // Extend the guide's configuration: move Debian's default paths to this folder.
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {};\n", path(kind).display()))
        .concat();
    let around = format!(
        "daemon off;\nmaster_process off;\npid {};\nevents {{}}\nhttp {{\naccess_log off;\n{temporary}include {};\n}}\n",
        path("nginx.pid").display(),
        path("gpu-mediator.conf").display()
    );
    fs::write(path("nginx.conf"), around)?;

    let checked = |command: &mut Command, input: &str| -> Result<String> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        child.stdin.take().context("no input")?.write_all(input.as_bytes())?;
        let output = child.wait_with_output()?;
        let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        ensure!(output.status.success(), "{command:?}: {}\n{said}", output.status);
        Ok(said)
    };
    checked(programs.promtool()?.args(["check", "config"]).arg(path("prometheus.yml")), "")?;
    checked(programs.promtool()?.args(["check", "rules"]).arg(rules.join("gpu-mediator.rules.yml")), "")?;
    checked(programs.promtool()?.args(["test", "rules"]).arg(rules.join("gpu-mediator.rules.test.yml")), "")?;
    let complaints = checked(programs.promtool()?.args(["check", "metrics"]), &daemon.get("/metrics")?)?;
    assert_eq!(complaints, "", "of promtool");

    let mut nginx = programs.nginx()?;
    nginx.arg("-e").arg(path("errors.log")).arg("-p").arg(scratch.path()).arg("-c").arg(path("nginx.conf"));
    let mut nginx = Server::start(&mut nginx, &path("nginx.log"))?;
    nginx.wait_ready(proxy_port, "/metrics").with_context(|| wait::tail(&path("nginx.log")))?;
    let through =
        |method: &str, path: &str| Ok::<_, anyhow::Error>(http::request(connect(proxy_port)?, method, path)?.0);
    assert_eq!((through("GET", "/metrics")?, through("POST", "/metrics")?), (200, 403));
    for forbidden in ["/", "/v1/vms", "/metrics/", "/metrics/../v1/vms", "//v1/vms"] {
        assert_eq!(through("GET", forbidden)?, 404, "{forbidden}");
    }

    let mut prometheus = programs.prometheus()?;
    prometheus.arg("--config.file").arg(path("prometheus.yml")).arg("--storage.tsdb.path").arg(path("data"));
    prometheus.arg(format!("--web.listen-address=127.0.0.1:{port}"));
    let mut prometheus = Server::start(&mut prometheus, &path("prometheus.log"))?;
    prometheus.wait_ready(port, "/-/ready").with_context(|| wait::tail(&path("prometheus.log")))?;
    let up = || value(port, "up{job=\"gpu-mediator\"}");
    wait::until("Prometheus to reach the daemon", ANSWER_TIMEOUT, || Ok(up()?.filter(|up| *up == 1.0)))
        .with_context(|| wait::tail(&path("prometheus.log")))?;

    // The entitlement of an idle VM changes over time, so read both values until they agree.
    let mut differing = Vec::new();
    let agree = wait::until("Prometheus and mediatorctl to agree", ANSWER_TIMEOUT, || {
        let expected = expected(&daemon)?;
        ensure!(expected.len() == 3 + VMS.len() * 11, "{expected:?}");
        differing.clear();
        for (query, wanted) in expected {
            let found = value(port, &query)?;
            if found.is_none_or(|found| (found - wanted).abs() > wanted.abs() * 1e-9) {
                differing.push(format!("{query}: {found:?}, mediatorctl {wanted}"));
            }
        }
        Ok(differing.is_empty().then_some(()))
    });
    agree.with_context(|| differing.join("\n"))?;
    // Run the guide's queries, except for rates, which need more time.
    let in_host = query(port, "gpu_mediator_vm_memory_bytes{place=\"host\"} > 0")?;
    assert!(in_host.len() == 1 && in_host[0]["metric"]["vm"] == "web", "{in_host:?}");
    let over = "gpu_mediator_vm_memory_bytes{place=\"card\"} > on(vm, card) gpu_mediator_vm_memory_entitled_bytes";
    assert_eq!(query(port, over)?, Vec::<Value>::new());
    let quantile = "histogram_quantile(0.99, gpu_mediator_vm_suspended_seconds_bucket{vm=\"web\"})";
    let suspended = value(port, quantile)?.context("no quantile")?;
    assert!(suspended > 0.0 && suspended <= 30.0, "{suspended} s");
    // All dashboard queries must be valid. Queries about VMs return results once rates have two samples.
    let queries = dashboard_queries(&packaging)?;
    ensure!(queries.len() > 50, "{queries:?}");
    let mut without = Vec::new();
    wait::until("results for all panels of VMs and cards", ANSWER_TIMEOUT, || {
        without.clear();
        for query in &queries {
            let result = self::query(port, query)?;
            if result.is_empty() && !OTHER_METRICS.iter().any(|metric| query.contains(metric)) {
                without.push(query.clone());
            }
        }
        Ok(without.is_empty().then_some(()))
    })
    .with_context(|| without.join("\n"))?;
    ensure!(alerts(port)?.is_empty(), "{:?}", alerts(port)?);

    drop(guests);
    daemon.ctl(&["vm", "remove", "build"])?.success()?;
    let there = "count(gpu_mediator_vm_vram_bytes)";
    wait::until("a removed VM to disappear from Prometheus", ANSWER_TIMEOUT, || {
        Ok(value(port, there)?.filter(|n| *n == 1.0))
    })?;
    ensure!(daemon.stop()?.success(), "{}", daemon.log_tail());
    wait::until("Prometheus to report the daemon as down", ANSWER_TIMEOUT, || Ok(up()?.filter(|up| *up == 0.0)))?;
    wait::until("the alert for an unresponsive daemon", ANSWER_TIMEOUT, || {
        Ok((alerts(port)? == ["GpuMediatorDown"]).then_some(()))
    })?;
    Ok(())
}
