//! Tests Slurm with one controller and two nodes on one host. Each node has its own daemon.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tests::{Debian, wait};

use crate::site::{CARD_MIB, Form, WAIT_TIMEOUT, blocks, json, names, run_node, start_node_with, start_up};

/// Text of the operator's guide to Slurm.
const PAGE: &str = include_str!("../../../docs/guides/slurm.md");
/// Names of the nodes.
const NODES: [&str; 2] = ["n1", "n2"];
/// Configuration of the controller and its nodes on one host. Each node has nominally eight CPUs, and a card with a
/// hundred shards.
const SLURM: &str = "ClusterName=test
SlurmctldHost=host(127.0.0.1)
SlurmUser=slurm
AuthType=auth/munge
StateSaveLocation=/var/lib/slurmctld
SlurmdSpoolDir=/var/spool/slurmd.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu,shard
SlurmdParameters=config_overrides
SlurmdTimeout=20
MessageTimeout=60
KillWait=5
ReturnToService=2
HealthCheckProgram=/etc/slurm/health
HealthCheckInterval=20
NodeName=n1 NodeHostname=host NodeAddr=127.0.0.1 Port=17001 CPUs=8 Gres=gpu:1,shard:100 State=UNKNOWN
NodeName=n2 NodeHostname=host NodeAddr=127.0.0.1 Port=17002 CPUs=8 Gres=gpu:1,shard:100 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
";
const GRES: &str = "Name=gpu File=/dev/null\nName=shard Count=100 File=/dev/null\n";
/// Arguments of the plugin and the health check.
const ARGUMENTS: &str = "socket=/run/%n/admin.sock sockets=/run/%n ledger=/var/log/gpu-mediator/%n.jsonl shards=100 chunk=4 \
    driver=/opt/fake/libcuda.so.1 patience=20";
/// First line of a job script, which selects the node's card for the fake driver.
const CARD: &str = "export FAKE_CUDA_FOLDER=/run/$SLURMD_NODENAME/card FAKE_CUDA_MIB=1088";

/// Starts the controller, the nodes and their daemons.
fn start(host: &Debian) -> Result<()> {
    start_with(host, SLURM, GRES, "")
}

/// Starts Slurm like [`start`], but with other Slurm configurations, and with additional tables in the daemons'
/// configurations.
fn start_with(host: &Debian, slurm: &str, gres: &str, tables: &str) -> Result<()> {
    host.write("/etc/slurm/slurm.conf", 0o644, slurm)?;
    host.write("/etc/slurm/gres.conf", 0o644, gres)?;
    host.write("/etc/slurm/cgroup.conf", 0o644, "CgroupPlugin=disabled\n")?;
    // Install the plugin with the commands in the guide, and then configure each node's arguments.
    let shell = blocks(PAGE, "sh");
    let [install] = &shell[..] else { bail!("docs/guides/slurm.md does not have exactly one block of commands") };
    host.ok(&format!("mkdir -p /etc/slurm/plugstack.conf.d && set -e; {install}"))?;
    let plugin = format!("required /etc/slurm/spank_gpu_mediator.so {ARGUMENTS}\n");
    host.write("/etc/slurm/plugstack.conf.d/gpu-mediator.conf", 0o644, &plugin)?;
    host.write("/etc/slurm/health", 0o755, &format!("#!/bin/sh\nexec gpu-mediator-slurm health {ARGUMENTS}\n"))?;
    host.ok(
        "for name in slurmctld slurmd slurmstepd; do ln -sf $name-wlm /usr/sbin/$name; done; mkdir -p \
         /var/lib/slurmctld /var/log/gpu-mediator /var/lib/munge /var/log/munge /run/munge /jobs && chmod 1777 /jobs && chown slurm \
         /var/lib/slurmctld && touch /var/log/slurmctld.log && chown slurm /var/log/slurmctld.log && dd if=/dev/urandom \
         of=/etc/munge/munge.key bs=64 count=1 2>/dev/null && chmod 400 /etc/munge/munge.key && chmod 700 /etc/munge && chown -R munge \
         /etc/munge /var/lib/munge /var/log/munge /run/munge",
    )?;
    host.start("authority", &format!("exec {} munged --foreground", user("munge")))?;
    host.start("controller", &format!("exec {} slurmctld -D", user("slurm")))?;
    for node in NODES {
        start_node_with(host, node, "", tables)?;
        start_slurmd(host, node)?;
    }
    host.until("the nodes to be idle", "test \"$(sinfo --noheader --Node --format=%t | sort -u)\" = idle", WAIT_TIMEOUT)
        .map(drop)
}

/// Returns a command prefix that switches to a user.
fn user(name: &str) -> String {
    format!("setpriv --reuid={name} --regid={name} --clear-groups")
}

/// Returns the unit name of a node's Slurm daemon.
fn slurmd(node: &str) -> String {
    format!("slurmd-{node}")
}

fn start_slurmd(host: &Debian, node: &str) -> Result<()> {
    host.start(&slurmd(node), &format!("mkdir -p /var/spool/slurmd.{node} && exec slurmd -D -N {node}"))
}

fn stop(host: &Debian) -> Result<()> {
    ["slurmd-n1", "slurmd-n2", "controller", "authority", "n1", "n2"].iter().try_for_each(|unit| host.stop(unit))
}

/// Submits a user's job. Returns the job ID.
fn submit(host: &Debian, user: &str, options: &str, program: &str) -> Result<u32> {
    let script = format!("{CARD}; {program}").replace('$', "\\$");
    let text = host.ok(&format!(
        "cd /jobs && {} sbatch --parsable --no-requeue --output=/jobs/%j.out {options} --wrap=\"{script}\"",
        self::user(user)
    ))?;
    text.trim().lines().last().unwrap_or_default().parse().with_context(|| format!("sbatch printed {text:?}"))
}

/// Returns a job script that holds card memory until it is terminated.
fn hold(mib: u32) -> String {
    format!("mkfifo /jobs/$SLURM_JOB_ID.in; exec cuda-program hold --mib {mib} 0<>/jobs/$SLURM_JOB_ID.in")
}

/// Returns a command that kills a job's program if it is running.
fn kill(job: u32) -> String {
    format!(
        "for p in $(pgrep cuda-program); do grep -qz '^SLURM_JOB_ID={job}$' /proc/$p/environ && exec kill -9 $p; done; false"
    )
}

/// Cancels or kills the jobs that hold memory, each as soon as it runs.
///
/// The controller decides the start order of the jobs. Together, they request more shards than the nodes have, so a job
/// may have to wait for any other job.
fn end_holding_jobs(host: &Debian, cancelled: &[u32], killed: &[u32]) -> Result<()> {
    let cancel = |job| format!("test \"$(squeue --noheader --jobs={job} --format=%T)\" = RUNNING && scancel {job}");
    let mut commands: Vec<String> =
        cancelled.iter().map(|job| cancel(*job)).chain(killed.iter().map(|job| kill(*job))).collect();
    while !commands.is_empty() {
        wait::until("any job that holds memory to run", WAIT_TIMEOUT * 2, || {
            let count = commands.len();
            let mut left = Vec::new();
            for command in commands.drain(..) {
                if host.run(&command)?.code != 0 {
                    left.push(command);
                }
            }
            commands = left;
            Ok((commands.len() < count).then_some(()))
        })
        .with_context(|| host.logs())?;
    }
    Ok(())
}

/// Waits until no job is pending, running or completing.
fn until_over(host: &Debian) -> Result<()> {
    host.until("the end of all jobs", "test -z \"$(squeue --noheader)\"", WAIT_TIMEOUT * 4).map(drop)
}

/// Returns the final state of a job.
fn state(host: &Debian, job: u32) -> Result<String> {
    let shown = host.ok(&format!("scontrol show job {job}"))?;
    let state = shown.split_whitespace().find_map(|word| word.strip_prefix("JobState="));
    Ok(state.context("a state")?.to_owned())
}

fn output(host: &Debian, job: u32) -> Result<String> {
    host.ok(&format!("cat /jobs/{job}.out"))
}

/// Returns the ledger's entries, by job.
fn ledger(host: &Debian) -> Result<BTreeMap<u32, Value>> {
    let text = host.ok("cat /var/log/gpu-mediator/*.jsonl")?;
    let mut jobs = BTreeMap::new();
    for line in text.lines() {
        let usage: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        let job = usage["job"].as_u64().and_then(|job| u32::try_from(job).ok()).context("a job")?;
        ensure!(jobs.insert(job, usage).is_none(), "job {job} is in the ledger twice");
    }
    Ok(jobs)
}

/// Checks that no tenants, sockets or folders of jobs remain on the nodes.
fn nothing_is_left(host: &Debian) -> Result<()> {
    for node in NODES {
        let socket = format!("/run/{node}/admin.sock");
        let left = "test -z \"$(mediatorctl --socket SOCKET tenant list | grep slurm-)\"".replace("SOCKET", &socket);
        host.until("the node to be clean", &left, WAIT_TIMEOUT)?;
        ensure!(names(host, &socket, "tenant")?.is_empty(), "{node} has tenants");
        host.ok(&format!("test -z \"$(ls /run/{node} | grep slurm-)\""))?;
    }
    Ok(())
}

/// Returns the amount of memory in MiB that a job's program allocated, from its last line of output.
fn filled(host: &Debian, job: u32) -> Result<u64> {
    let text = output(host, job)?;
    text.lines().last().and_then(|line| line.trim().parse().ok()).with_context(|| format!("job {job}: {text}"))
}

/// Tests each type of job and each way of ending a job once.
#[test]
fn slurm_jobs_get_the_resources_they_request() -> Result<()> {
    let Some(host) = start_up("slurm", Form::Deb)? else { return Ok(()) };
    let host = &host;
    start(host)?;
    let quarter = submit(host, "alice", "--nodelist=n1 --gres=shard:25", "cuda-program fill")?;
    let less = submit(host, "bob", "--nodelist=n1 --gres=shard:25 --gpu-memory=64M", "cuda-program fill")?;
    let none = submit(host, "bob", "--nodelist=n2", "env | grep -c GPU_MEDIATOR; cuda-program fill")?;
    let bare = submit(host, "bob", "--nodelist=n2 --gpu-memory=64M", "cuda-program fill")?;
    let held = submit(host, "alice", "--nodelist=n2 --gres=shard:50", &hold(100))?;
    let killed = submit(host, "bob", "--nodelist=n2 --gres=shard:10", &hold(40))?;
    let vgpu = submit(
        host,
        "alice",
        "--nodelist=n1 --gres=shard:50 --vgpu",
        "stat -c '%F %U %a' $GPU_MEDIATOR_VFIO_USER_SOCKET",
    )?;
    // Check a running job's memory on the card, and that only the job's user may connect.
    let has = |job: u32, mib: u32| {
        format!(
            "mediatorctl --socket /run/n2/admin.sock --json tenant show slurm-{job} | grep -q '\"on_card_bytes\": {}'",
            u64::from(mib) << 20
        )
    };
    host.until("a job to hold memory", &has(held, 100), WAIT_TIMEOUT)?;
    host.until("another to hold memory", &has(killed, 40), WAIT_TIMEOUT)?;
    host.ok(&format!("test \"$(stat -c '%U %a' /run/n2/slurm-{held}/cuda.sock)\" = 'alice 600'"))?;
    is_restarted(host, held, &has(held, 100))?;
    host.ok(&format!("scancel {held}"))?;
    host.ok(&kill(killed))?;
    until_over(host)?;
    for (job, expected) in [
        (quarter, "COMPLETED"),
        (less, "COMPLETED"),
        (none, "FAILED"),
        (bare, "FAILED"),
        (held, "CANCELLED"),
        (vgpu, "COMPLETED"),
    ] {
        ensure!(
            state(host, job)? == expected,
            "job {job} is {}, expected {expected}: {}",
            state(host, job)?,
            output(host, job)?
        );
    }
    ensure!(state(host, killed)? != "COMPLETED", "a job that was killed has completed");
    let (of_quarter, of_less) = (filled(host, quarter)?, filled(host, less)?);
    ensure!((224..=256).contains(&of_quarter) && (48..=64).contains(&of_less), "{of_quarter} and {of_less} MiB");
    ensure!(output(host, none)?.starts_with('0'), "a job without shards has variables: {}", output(host, none)?);
    ensure!(output(host, bare)?.contains("request some with --gres=shard:N"), "{}", output(host, bare)?);
    ensure!(output(host, vgpu)?.trim() == "socket alice 600", "{}", output(host, vgpu)?);
    nothing_is_left(host)?;
    let written = ledger(host)?;
    ensure!(written.keys().copied().collect::<Vec<_>>() == [quarter, less, held, killed, vgpu], "{written:#?}");
    ensure!(written[&vgpu]["kind"] == "vgpu" && written[&vgpu]["card"] == "soft", "{written:#?}");
    is_lost(host)?;
    stop(host)
}

/// Tests jobs that need the shards of both cards of a node.
#[test]
fn slurm_job_with_shards_of_two_cards_is_one_tenant() -> Result<()> {
    let Some(host) = start_up("slurm-cards", Form::Deb)? else { return Ok(()) };
    let host = &host;
    let slurm = SLURM
        .replace("SelectTypeParameters=CR_Core", "SelectTypeParameters=CR_Core,MULTIPLE_SHARING_GRES_PJ")
        .replace("Gres=gpu:1,shard:100", "Gres=gpu:2,shard:200");
    let gres = ["null", "zero"].map(|file| format!("Name=gpu File=/dev/{file}\n")).concat()
        + &["null", "zero"].map(|file| format!("Name=shard Count=100 File=/dev/{file}\n")).concat();
    let second = format!(
        "\n[[card]]\nname = \"second\"\nkind = \"cuda\"\nvram_mib = {CARD_MIB}\nmemory.host_mib = 256\n\
         memory.quanta.mode = \"off\"\ncuda.device = \"1\"\ncuda.driver = \"/opt/fake/libcuda.so.1\"\n\
         cuda.chunk_mib = 4\ncuda.host_ready_mib = 4\n"
    );
    start_with(host, &slurm, &gres, &second)?;
    let on_both = |program: &str| format!("export FAKE_CUDA_CARDS=2; {program}");
    let uneven = submit(host, "alice", "--nodelist=n1 --gres=shard:120", &on_both(&hold(100)))?;
    let vgpu = submit(host, "bob", "--nodelist=n2 --gres=shard:120 --vgpu", "true")?;
    let path = format!("--socket /run/n1/admin.sock tenant show slurm-{uneven}");
    host.until(
        "a job to hold memory",
        &format!("mediatorctl --json {path} | grep -q '\"on_card_bytes\": {}'", 100 << 20),
        WAIT_TIMEOUT,
    )?;
    let shown = json(host, &path)?;
    ensure!(shown["cards"] == serde_json::json!(["h100", "second"]), "{shown}");
    // 100 shards are on one card, and 20 are on the other.
    ensure!(shown["time"]["guarantee_permille"] == 200 && shown["vram_mib"] == CARD_MIB / 5 / 4 * 4, "{shown}");
    for card in ["h100", "second"] {
        host.ok(&format!("test \"$(stat -c '%U %a' /run/n1/slurm-{uneven}/{card}.sock)\" = 'alice 600'"))?;
    }
    host.ok(&format!("scancel {uneven}"))?;
    until_over(host)?;
    ensure!(output(host, vgpu)?.contains("--vgpu: the shards are on cards [0, 1]"), "{}", output(host, vgpu)?);
    let whole = submit(host, "alice", "--nodelist=n1 --gres=shard:200", &on_both("cuda-program fill"))?;
    until_over(host)?;
    ensure!(state(host, whole)? == "COMPLETED", "{}", output(host, whole)?);
    nothing_is_left(host)?;
    let written = ledger(host)?;
    ensure!(written.keys().copied().collect::<Vec<_>>() == [uneven, whole], "{written:#?}");
    ensure!(written[&whole]["card"] == "h100,second" && written[&whole]["weight"] == 100, "{written:#?}");
    stop(host)
}

/// Restarts a node's daemon while a job runs. The job's tenant, process and memory are kept, and the process is served
/// again once the job starts another process.
fn is_restarted(host: &Debian, job: u32, has_memory: &str) -> Result<()> {
    let process = format!(
        "for p in $(pgrep cuda-program); do if grep -qz '^SLURM_JOB_ID={job}$' /proc/$p/environ 2>/dev/null; then echo $p; fi; done"
    );
    let before = host.ok(&process)?;
    ensure!(before.trim().parse::<u32>().is_ok(), "job {job} does not have exactly one program: {before}");
    host.stop("n2")?;
    ensure!(host.ok(&process)? == before, "the program exited with the daemon");
    run_node(host, "n2")?;
    let kept = names(host, "/run/n2/admin.sock", "tenant")?;
    ensure!(kept.contains(&format!("slurm-{job}")), "{kept:?}");
    // When the job starts another process, the plugin grants the job's user access to the new socket.
    host.ok(&format!("{} srun --jobid={job} --overlap true", user("alice")))?;
    host.until("the program to be served with its memory again", has_memory, WAIT_TIMEOUT)?;
    ensure!(host.ok(&process)? == before, "another process runs");
    let state = host.ok(&format!("squeue --noheader --jobs={job} --format=%T"))?;
    ensure!(state.trim() == "RUNNING", "job {job} is {state}");
    Ok(())
}

/// Simulates a node that loses power while a job runs, and is later restarted.
fn is_lost(host: &Debian) -> Result<()> {
    let lost = submit(host, "alice", "--nodelist=n2 --gres=shard:40", &hold(100))?;
    let has = format!(
        "mediatorctl --socket /run/n2/admin.sock --json tenant show slurm-{lost} | grep -q '\"on_card_bytes\": {}'",
        100 << 20
    );
    host.until("a job to hold memory", &has, WAIT_TIMEOUT)?;
    host.kill("slurmd-n2")?;
    host.kill("n2")?;
    host.ok(&format!(
        "kill -9 $(pgrep -f 'slurmstepd: .{lost}\\.') $(pgrep --uid alice); rm -rf /run/n2/*.sock /run/n2/slurm-*; true"
    ))?;
    // The daemon retains tenants across a power loss. The health check detects that the job has ended.
    run_node(host, "n2")?;
    let kept = names(host, "/run/n2/admin.sock", "tenant")?;
    ensure!(kept == [format!("slurm-{lost}")], "{kept:?}");
    // The controller marks the node as down and ends the job before the node returns.
    until_over(host)?;
    start_slurmd(host, "n2")?;
    nothing_is_left(host)?;
    ensure!(ledger(host)?.contains_key(&lost), "a job that was lost with its node is not in the ledger");
    host.until("the node to be idle", "test \"$(sinfo --noheader --nodes=n2 --format=%t)\" = idle", WAIT_TIMEOUT)
        .map(drop)
}

/// Checks the ledger against the jobs' requested shards and weights, the usage reported to the controller at run time,
/// and the elapsed time.
fn add_up(
    host: &Debian,
    written: &BTreeMap<u32, Value>,
    asked: &BTreeMap<u32, (u32, u32)>,
    elapsed: Duration,
) -> Result<()> {
    let mut nodes: BTreeMap<String, u128> = BTreeMap::new();
    for (job, usage) in written {
        let (shards, weight) = asked.get(job).context("a job that was submitted")?;
        let number = |key: &str| usage[key].as_u64().with_context(|| format!("{key} of {usage}"));
        ensure!(number("weight")? == u64::from(*weight) && number("killed")? == 0, "{usage}, expected weight {weight}");
        let part = CARD_MIB * u64::from(*shards) / 100 / 4 * 4;
        ensure!([part, 48].contains(&number("memory_mib")?), "{usage}, expected {part} MiB, or 48");
        let node = usage["node"].as_str().context("a node")?;
        ensure!(NODES.contains(&node), "{usage}");
        *nodes.entry(node.to_owned()).or_default() += u128::from(number("used_ns")?);
        // The last report to the controller, if any, precedes the job's end.
        let shown = host.ok(&format!("scontrol show job {job}"))?;
        let noted = shown.split_whitespace().find_map(|word| word.strip_prefix("gpu_seconds="));
        if let Some(noted) = noted {
            let noted: f64 = noted.parse()?;
            ensure!(noted <= number("used_ns")? as f64 / 1e9 + 0.001, "{noted} s were noted: {usage}");
        }
    }
    println!("card time charged in {elapsed:?}: {nodes:?} ns");
    ensure!(
        nodes.len() == NODES.len() && nodes.values().all(|used| *used <= elapsed.as_nanos()),
        "{nodes:?} of {elapsed:?}"
    );
    Ok(())
}

/// Run time of the jobs that share a card by weight.
const BUSY: Duration = Duration::from_secs(30);
/// Number of jobs in the long run.
const JOBS: u32 = 40;

/// Tests a long run: many jobs with different shares, some of which are cancelled or killed, and a lost node.
#[test]
fn forty_jobs_leave_nothing_and_their_accounts_add_up() -> Result<()> {
    let Some(host) = start_up("jobs", Form::Deb)? else { return Ok(()) };
    let host = &host;
    start(host)?;
    let began = Instant::now();
    // Run two jobs alone on a node, with equal shards and weights of 3:1. They must share the card 3:1.
    let busy = format!("cuda-program busy --kernel-us 1000 --ms {}", BUSY.as_millis());
    let heavy = submit(host, "alice", "--nodelist=n1 --gres=shard:10 --gpu-weight=300", &busy)?;
    let light = submit(host, "bob", "--nodelist=n1 --gres=shard:10 --gpu-weight=100", &busy)?;
    until_over(host)?;
    let used = |written: &BTreeMap<u32, Value>, job: u32| {
        written.get(&job).and_then(|usage| usage["used_ns"].as_u64()).unwrap_or(0)
    };
    let written = ledger(host)?;
    let (of_heavy, of_light) = (used(&written, heavy), used(&written, light));
    println!("weights 300 and 100: {of_heavy} and {of_light} ns");
    ensure!(
        of_light > 0 && of_heavy * 2 > of_light * 3 && of_heavy < of_light * 5,
        "{of_heavy} and {of_light} ns, expected 3:1"
    );
    // The total usage of the card must not exceed the elapsed time.
    let most = began.elapsed().as_nanos();
    ensure!(u128::from(of_heavy + of_light) <= most, "{of_heavy} and {of_light} ns of {most}");
    ensure!(u128::from(of_heavy + of_light) * 2 > BUSY.as_nanos(), "{of_heavy} and {of_light} ns of {BUSY:?}");
    let mut asked = BTreeMap::from([(heavy, (10, 300)), (light, (10, 100))]);
    let mut fills = BTreeMap::new();
    let mut all = vec![heavy, light];
    let (mut cancelled, mut killed) = (Vec::new(), Vec::new());
    for index in 0..JOBS - 3 {
        let user = ["alice", "bob"][index as usize % 2];
        let shards = [5_u32, 10, 20, 25, 40, 60][index as usize % 6];
        let weight = [50, 100, 300][index as usize % 3];
        let options = format!("--gres=shard:{shards} --gpu-weight={weight}");
        let job = match index % 4 {
            0 => submit(host, user, &options, "cuda-program train --mib 20 --rounds 6 --spin-us 2000")?,
            1 => submit(host, user, &options, "cuda-program fill")?,
            2 => submit(host, user, &format!("{options} --gpu-memory=48M"), "cuda-program fill")?,
            _ => submit(host, user, &options, &hold(20))?,
        };
        match index % 4 {
            1 => drop(fills.insert(job, u64::from(shards) * 1024 / 100)),
            2 => drop(fills.insert(job, 48)),
            3 if index % 8 == 3 => cancelled.push(job),
            3 => killed.push(job),
            _ => {}
        }
        asked.insert(job, (shards, weight));
        all.push(job);
    }
    end_holding_jobs(host, &cancelled, &killed)?;
    until_over(host)?;
    nothing_is_left(host)?;
    for (job, mib) in &fills {
        let got = filled(host, *job)?;
        ensure!(got <= *mib && got + 16 > *mib, "job {job} had {got} MiB, expected nearly {mib}");
    }
    for job in cancelled.iter().chain(&killed) {
        ensure!(state(host, *job)? != "COMPLETED", "job {job} was ended");
    }
    let written = ledger(host)?;
    // A job that is cancelled while its shards are being allocated has used no card time, and may be missing from the
    // ledger.
    all.retain(|job| written.contains_key(job) || !cancelled.contains(job));
    asked.retain(|job, _| all.contains(job));
    ensure!(written.keys().eq(&all), "the ledger contains jobs {:?}, expected {all:?}", written.keys());
    add_up(host, &written, &asked, began.elapsed())?;
    is_lost(host)?;
    stop(host)
}
