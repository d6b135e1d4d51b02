//! `mediatorctl sched`: shows and changes the division of cards' time.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use hyper::Method;
use sched::trace::Trace;
use sched::{CopyShare, Engine, LatencyClass, PolicyKind, Queues};
use serde_json::{Map, Value};

use super::client::{self, Client, ClientError};
use super::values::{Percent, named, span};
use super::watch::Watch;
use super::{Form, output, replay, report};
use config::TimeShare;

#[derive(Clone, Debug, Subcommand)]
pub(super) enum SchedCommand {
    /// Shows how the time of all cards, or of one card, is shared
    Show {
        /// Name of the card
        card: Option<String>,
        #[command(flatten)]
        watch: Watch,
    },
    /// Changes how a card's time is shared, with immediate effect; queued and running work continues
    #[command(override_usage = "mediatorctl sched set CARD SETTING...")]
    Set(Box<SetCard>),
    /// Changes a virtual machine's or tenant's share of its card's time, with immediate effect
    #[command(override_usage = "mediatorctl sched set-vm VM SHARE...")]
    SetVm(SetVm),
    /// Releases a virtual machine or tenant from quarantine, and resets its strikes
    Release {
        /// Name of the virtual machine or tenant
        vm: String,
    },
    /// Draws the usage of an engine by virtual machines or tenants over time, as an SVG file
    Report(Report),
    /// Records the events and decisions of a card's scheduler for some time
    Record(Record),
    /// Replays a recording; exits with 1 if the scheduler decides differently. Needs no daemon
    Replay(Replay),
}

#[derive(Clone, Debug, Args)]
pub(super) struct SetCard {
    /// Name of the card
    card: String,
    #[command(flatten)]
    settings: Settings,
}

/// Time settings of a card. Omitted settings stay unchanged.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = true)]
struct Settings {
    /// Scheduling policy: direct, fifo, credit, band or disengaged
    #[arg(long, value_name = "POLICY", value_parser = named::<PolicyKind>)]
    policy: Option<PolicyKind>,
    /// Queues and accounts: separate (one set per engine) or single (one set for all engines)
    #[arg(long, value_name = "QUEUES", value_parser = named::<Queues>)]
    queues: Option<Queues>,
    /// credit, band: interval at which budgets are refilled, in milliseconds
    #[arg(long, value_name = "MS")]
    period_ms: Option<u64>,
    /// band: maximum wait for the next submission of a VM below its share, in microseconds
    #[arg(long, value_name = "US")]
    wait_us: Option<u64>,
    /// band: carry over a VM's surplus or deficit; false gives BAND as published
    #[arg(long, value_name = "BOOL")]
    correct: Option<bool>,
    /// credit, band: charge the scheduler's own time and waits as GPU time
    #[arg(long, value_name = "BOOL")]
    own_time: Option<bool>,
    /// band: uncharged wait for a VM's next submission, in percent of the time that the VM has used since it got the
    /// engine
    #[arg(long, value_name = "PERCENT")]
    free_wait: Option<Percent>,
    /// disengaged: length of a phase in which VMs run one at a time and are measured, in milliseconds
    #[arg(long, value_name = "MS")]
    engaged_ms: Option<u64>,
    /// disengaged: length of the phase between measurements, in which VMs run freely, in milliseconds
    #[arg(long, value_name = "MS")]
    free_ms: Option<u64>,
    /// Maximum number of submissions on an engine while VMs compete
    #[arg(long, value_name = "COUNT")]
    pipeline_contended: Option<u32>,
    /// Maximum number of submissions on an engine while only one VM has work
    #[arg(long, value_name = "COUNT")]
    pipeline_alone: Option<u32>,
    /// Maximum expected duration of the work on an engine beyond two submissions, in microseconds
    #[arg(long, value_name = "US")]
    ahead_us: Option<u64>,
    /// Maximum age of a card's completion timestamp when the completion is observed, in microseconds
    #[arg(long, value_name = "US")]
    stamp_slack_us: Option<u64>,
    /// Number of overlong submissions after which a VM is quarantined; 0 means never
    #[arg(long, value_name = "COUNT")]
    strikes: Option<u32>,
    /// Length of a quarantine in seconds; 0 means until `sched release`
    #[arg(long, value_name = "S")]
    quarantine_s: Option<u64>,
}

impl Settings {
    fn patch(&self) -> Map<String, Value> {
        let ns = |value: Option<u64>, unit: u64| value.map(|value| value.saturating_mul(unit));
        let mut patch = Patch::default();
        patch.set(&["policy"], self.policy);
        patch.set(&["queues"], self.queues);
        patch.set(&["band", "period_ns"], ns(self.period_ms, 1_000_000));
        patch.set(&["band", "wait_ns"], ns(self.wait_us, 1000));
        patch.set(&["band", "correct"], self.correct);
        patch.set(&["band", "own_time"], self.own_time);
        patch.set(&["band", "free_wait_permille"], self.free_wait.map(|part| part.permille));
        patch.set(&["disengaged", "engaged_ns"], ns(self.engaged_ms, 1_000_000));
        patch.set(&["disengaged", "free_ns"], ns(self.free_ms, 1_000_000));
        patch.set(&["pipeline", "contended"], self.pipeline_contended);
        patch.set(&["pipeline", "alone"], self.pipeline_alone);
        patch.set(&["pipeline", "ahead_ns"], ns(self.ahead_us, 1000));
        patch.set(&["stamp_slack_ns"], ns(self.stamp_slack_us, 1000));
        patch.set(&["strikes"], self.strikes);
        patch.set(&["quarantine_ns"], ns(self.quarantine_s, 1_000_000_000));
        patch.0
    }
}

/// Request body that changes some keys.
#[derive(Debug, Default)]
struct Patch(Map<String, Value>);

impl Patch {
    /// Sets a key if a value is given.
    fn set(&mut self, path: &[&str], value: Option<impl serde::Serialize>) {
        let Some(value) = value.and_then(|value| serde_json::to_value(value).ok()) else { return };
        let Some((key, tables)) = path.split_last() else { return };
        let mut table = &mut self.0;
        for name in tables {
            let inner = table.entry(*name).or_insert_with(|| Value::Object(Map::new()));
            let Value::Object(inner) = inner else { return };
            table = inner;
        }
        table.insert((*key).to_owned(), value);
    }
}

/// Options for a virtual machine's or tenant's share of its card's time.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct TimeFlags {
    /// Weight for the card's time, relative to the weights of all competitors, from 1 to 10000
    #[arg(long, help_heading = "Time", value_name = "WEIGHT")]
    weight: Option<u32>,
    /// Guaranteed share of the card's time while the VM has work, in percent
    #[arg(long, help_heading = "Time", value_name = "PERCENT")]
    guarantee: Option<Percent>,
    /// Maximum share of the card's time in percent, even if the rest stays unused
    #[arg(long, help_heading = "Time", value_name = "PERCENT")]
    cap: Option<Percent>,
    /// Latency class: interactive, normal or background; among those that are due, the better class runs first
    #[arg(long, help_heading = "Time", value_name = "CLASS", value_parser = named::<LatencyClass>)]
    class: Option<LatencyClass>,
    /// Time limit of one submission in milliseconds; 0 means no limit
    #[arg(long, help_heading = "Time", value_name = "MS")]
    max_run_ms: Option<u64>,
    /// Weight for the copy engines, or `compute` to use the weight for compute
    #[arg(long, help_heading = "Time", value_name = "WEIGHT|compute")]
    copy_weight: Option<OfCopies<u32>>,
    /// Guaranteed share of the copy engines in percent, or `compute` to use the guarantee for compute
    #[arg(long, help_heading = "Time", value_name = "PERCENT|compute")]
    copy_guarantee: Option<OfCopies<Percent>>,
    /// Maximum share of the copy engines in percent, or `compute` to use the cap for compute
    #[arg(long, help_heading = "Time", value_name = "PERCENT|compute")]
    copy_cap: Option<OfCopies<Percent>>,
}

/// A setting for the copy engines. `None` means the value for compute.
#[derive(Clone, Copy, Debug)]
struct OfCopies<T>(Option<T>);

impl<T: FromStr<Err: Display>> FromStr for OfCopies<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "compute" => Ok(Self(None)),
            text => text.parse().map(|value| Self(Some(value))).map_err(|error| format!("{error}; or `compute`")),
        }
    }
}

impl TimeFlags {
    /// Returns the share, with defaults for missing options.
    pub(super) fn share(self) -> TimeShare {
        let Self { weight, guarantee, cap, class, max_run_ms, copy_weight, copy_guarantee, copy_cap } = self;
        let permille = |of: Option<OfCopies<Percent>>| of.and_then(|part| part.0).map(|part| part.permille);
        let default = TimeShare::default();
        TimeShare {
            weight: weight.unwrap_or(default.weight),
            guarantee_permille: guarantee.map_or(default.guarantee_permille, |part| part.permille),
            cap_permille: cap.map_or(default.cap_permille, |part| part.permille),
            class: class.unwrap_or(default.class),
            max_run_ms,
            copies: CopyShare {
                weight: copy_weight.and_then(|weight| weight.0),
                guarantee_permille: permille(copy_guarantee),
                cap_permille: permille(copy_cap),
            },
        }
    }

    pub(super) fn patch(&self) -> Map<String, Value> {
        let mut patch = Patch::default();
        patch.set(&["weight"], self.weight);
        patch.set(&["guarantee_permille"], self.guarantee.map(|part| part.permille));
        patch.set(&["cap_permille"], self.cap.map(|part| part.permille));
        patch.set(&["class"], self.class);
        patch.set(&["max_run_ms"], self.max_run_ms);
        // A null makes the copy engines use the value for compute.
        let permille = |of: Option<OfCopies<Percent>>| of.map(|part| part.0.map(|part| part.permille));
        patch.set(&["copies", "weight"], self.copy_weight.map(|weight| weight.0));
        patch.set(&["copies", "guarantee_permille"], permille(self.copy_guarantee));
        patch.set(&["copies", "cap_permille"], permille(self.copy_cap));
        patch.0
    }
}

#[derive(Clone, Debug, Args)]
#[command(group = ArgGroup::new("some").required(true).multiple(true)
    .args(["weight", "guarantee", "cap", "class", "max_run_ms", "copy_weight", "copy_guarantee", "copy_cap"]))]
pub(super) struct SetVm {
    /// Name of the virtual machine or tenant
    vm: String,
    #[command(flatten)]
    time: TimeFlags,
}

#[derive(Clone, Debug, Args)]
pub(super) struct Report {
    /// Name of the card
    card: String,
    /// Start of the report as a time before now, such as 30s; the daemon keeps one minute of data
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = span)]
    since: Duration,
    /// Length of the windows over which use is summed, a multiple of 100ms
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = span)]
    window: Duration,
    /// Engine: compute, copy0 or copy1; by default, the most used engine
    #[arg(long, value_name = "ENGINE", value_parser = named::<Engine>)]
    engine: Option<Engine>,
    /// Stacks the areas of the VMs instead of drawing one line per VM
    #[arg(long)]
    stacked: bool,
    /// File to write
    #[arg(long = "out", value_name = "FILE")]
    out: PathBuf,
}

#[derive(Clone, Debug, Args)]
pub(super) struct Record {
    /// Name of the card
    card: String,
    /// Duration of the recording, such as 10s; at most one minute
    #[arg(long = "for", value_name = "TIME", default_value = "10s", value_parser = span)]
    length: Duration,
    /// File to write; a recording has at most 32 MiB
    #[arg(long = "out", value_name = "FILE")]
    out: PathBuf,
    /// Format of the file
    #[arg(long, value_name = "FORMAT", default_value = "jsonl")]
    format: RecordFormat,
}

/// File format of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RecordFormat {
    /// JSON lines, for `sched replay`
    Jsonl,
    /// Trace for Perfetto and chrome://tracing
    Perfetto,
}

#[derive(Clone, Debug, Args)]
pub(super) struct Replay {
    /// File with the recording
    file: PathBuf,
    /// Shows the shares that this policy would give for the same arrivals, instead of checking decisions
    #[arg(long, value_name = "POLICY", value_parser = named::<PolicyKind>)]
    policy: Option<PolicyKind>,
}

/// Returns the API path of a card's scheduler.
fn scheduler_path(card: &str) -> String {
    format!("/v1/cards/{}/scheduler", client::segment(card))
}

/// Runs a command and returns its output.
pub(super) fn answer(client: &Client, form: Form, command: SchedCommand) -> Result<String, ClientError> {
    Ok(match command {
        SchedCommand::Show { card: None, .. } => {
            let list: api::SchedulerList = client.get("/v1/schedulers")?;
            // Each card's table shows that card's part of a tenant with several cards. An additional table shows the
            // whole tenant.
            let api::TenantList { tenants } = client.get("/v1/tenants")?;
            let text = |list: &api::SchedulerList| output::scheduler::cards(&list.schedulers);
            form.render(&list, |list| text(list) + &output::scheduler::gangs(&tenants))
        }
        SchedCommand::Show { card: Some(card), .. } => {
            let scheduler: api::CardScheduler = client.get(&scheduler_path(&card))?;
            form.render(&scheduler, output::scheduler::card)
        }
        SchedCommand::Set(set) => {
            let SetCard { card, settings } = *set;
            let scheduler: api::CardScheduler = client.patch(&scheduler_path(&card), &settings.patch())?;
            form.render(&scheduler, output::scheduler::card)
        }
        SchedCommand::SetVm(SetVm { vm, time }) => {
            let path = format!("/v1/vms/{}/time", client::segment(&vm));
            let time: api::VmTime = client.patch(&path, &time.patch())?;
            form.render(&time, |time| output::scheduler::vm_time(&vm, time))
        }
        SchedCommand::Release { vm } => {
            client.request(Method::POST, &format!("/v1/vms/{}/release", client::segment(&vm)), Default::default())?;
            form.render(&serde_json::json!({ "released": vm }), |_| format!("VM {vm} released, strikes cleared\n"))
        }
        SchedCommand::Report(wanted) => {
            let Report { card, since, window, engine, stacked, out } = wanted;
            let path = format!("{}/history?since_ms={}", scheduler_path(&card), since.as_millis());
            let history: api::SchedulerHistory = client.get(&path)?;
            let engine = engine.unwrap_or_else(|| report::busiest(&history));
            let uses = report::Uses::from_history(&history, engine, window.as_millis()).map_err(ClientError::Report)?;
            let svg = uses.svg(&history.card, stacked).map_err(ClientError::Report)?;
            std::fs::write(&out, svg).map_err(|source| ClientError::File { path: out.clone(), source })?;
            let summary = uses.summary(&out.display().to_string());
            form.render(&summary, output::scheduler::report)
        }
        SchedCommand::Record(Record { card, length, out, format }) => {
            let path = format!("{}/record?for_ms={}", scheduler_path(&card), length.as_millis());
            let record = client.request(Method::POST, &path, Default::default())?;
            let written = match format {
                RecordFormat::Jsonl => std::fs::write(&out, &record),
                RecordFormat::Perfetto => {
                    let trace = Trace::read(&record[..]).map_err(|error| ClientError::protocol(error.to_string()))?;
                    std::fs::write(&out, perfetto_trace::convert(&trace, &card).to_string())
                }
            };
            written.map_err(|source| ClientError::File { path: out.clone(), source })?;
            let events = record.iter().filter(|byte| **byte == b'\n').count().saturating_sub(1);
            let file = out.display().to_string();
            form.render(&serde_json::json!({ "file": file, "events": events, "bytes": record.len() }), |_| {
                format!("{events} events of {card}'s scheduler in {file}\n")
            })
        }
        SchedCommand::Replay(Replay { file, policy }) => {
            form.render(&replay::replay(&file, policy)?, output::scheduler::replay)
        }
    })
}
