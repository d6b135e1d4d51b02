//! Renders cards' time and its division as tables for people.

use std::fmt::Write;

use serde_json::Value;

use super::{NOTHING, heads, row, table};
use crate::replay::Replayed;
use crate::report::Summary;
use api::{CardScheduler, Tenant, VmShare, VmTime};
use sched::Engine;

/// Renders a permille value as percent.
#[must_use]
pub fn percent(permille: u32) -> String {
    format!("{}.{} %", permille / 10, permille % 10)
}

/// Renders a duration in a suitable unit.
#[must_use]
pub fn duration(ns: u64) -> String {
    let units = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1000)];
    let Some((name, unit)) = units.into_iter().find(|(_, unit)| ns >= *unit) else { return format!("{ns} ns") };
    match (ns / unit, ns % unit * 10 / unit) {
        (whole, 0) => format!("{whole} {name}"),
        (whole, _) if whole >= 100 => format!("{whole} {name}"),
        (whole, tenth) => format!("{whole}.{tenth} {name}"),
    }
}

/// Renders a virtual machine's scheduling state: its quarantine and the remaining time, or the reason for its wait.
#[must_use]
pub fn state(vm: &VmShare) -> String {
    match vm.quarantine {
        None => vm.waits_for.as_ref().map_or_else(|| NOTHING.to_owned(), |reason| format!("waits for {reason}")),
        Some(quarantine) => match quarantine.ends_in_ms {
            None => "QUARANTINED".to_owned(),
            Some(ms) => format!("QUARANTINED for {}", duration(ms.saturating_mul(1_000_000))),
        },
    }
}

/// Adds an operator's settings, one row per key. Renders times and fractions in readable units, for any set of keys.
fn settings(prefix: &str, value: &Value, rows: &mut Vec<Vec<String>>) {
    if let Value::Object(keys) = value {
        for (key, value) in keys {
            let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            settings(&name, value, rows);
        }
        return;
    }
    let number = value.as_u64();
    let small = number.and_then(|number| u32::try_from(number).ok());
    let shown = match (prefix.strip_suffix("_ns").zip(number), prefix.strip_suffix("_permille").zip(small)) {
        (Some((name, ns)), _) => [name.to_owned(), duration(ns)],
        (_, Some((name, permille))) => [name.to_owned(), percent(permille)],
        _ => [prefix.to_owned(), value.as_str().map_or_else(|| value.to_string(), str::to_owned)],
    };
    rows.push(shown.into());
}

fn max_run(time: &VmTime) -> String {
    match time.max_run_ms {
        None | Some(0) => "no limit".to_owned(),
        Some(ms) => duration(ms.saturating_mul(1_000_000)),
    }
}

/// Returns the copy engines' weight, guarantee and cap, if any of them is set separately from compute.
fn copies(time: &VmTime) -> Option<[String; 3]> {
    let sched::VgpuParams { weight, guarantee_permille, cap_permille, .. } =
        time.params(None).for_engine(Engine::Copy0);
    let told = || [weight.to_string(), percent(guarantee_permille), percent(cap_permille)];
    (!time.copies.is_silent()).then(told)
}

fn class(time: &VmTime) -> String {
    serde_json::to_value(time.class).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

/// Renders all cards that have a scheduler.
#[must_use]
pub fn cards(cards: &[CardScheduler]) -> String {
    if cards.is_empty() {
        return "no card has a scheduler\n".to_owned();
    }
    cards.iter().map(card).collect::<Vec<_>>().join("\n")
}

/// Renders tenants with several cards, each once. Returns an empty text if no tenant has several cards.
#[must_use]
pub fn gangs(tenants: &[Tenant]) -> String {
    let several: Vec<&Tenant> = tenants.iter().filter(|tenant| !tenant.cards.is_empty()).collect();
    if several.is_empty() {
        return String::new();
    }
    let mut rows =
        vec![heads(&["TENANT", "CARDS", "WEIGHT", "ENTITLED", "RECEIVED", "TURNS", "CANCELLED", "WAIT 99 %", "STATE"])];
    rows.extend(several.into_iter().map(|tenant| {
        let states = || tenant.card_states.iter();
        let waits = tenant.waits_for.as_ref().map(|reason| format!("waits for {reason}"));
        row(&[
            &tenant.name,
            &tenant.all_cards(),
            &tenant.time.weight,
            &percent(tenant.entitled_permille),
            &percent(tenant.received_permille),
            // A turn spans all cards, but each owner counts turns since its own start.
            &states().map(|state| state.turns).min().unwrap_or(0),
            &states().map(|state| state.cancelled).max().unwrap_or(0),
            &duration(tenant.wait_p99_ns),
            &waits.unwrap_or_else(|| tenant.state.name().to_owned()),
        ])
    }));
    format!("\n{}", table(rows, &[2, 3, 4, 5, 6, 7]))
}

/// Renders the division of one card's time.
#[must_use]
pub fn card(card: &CardScheduler) -> String {
    let mut rows = vec![row(&[&"card", &card.card])];
    settings("", &serde_json::to_value(card.settings).unwrap_or(Value::Null), &mut rows);
    rows.push(row(&[&"queued", &card.queued]));
    rows.push(row(&[&"on the card", &card.in_flight]));
    let mut text = table(rows, &[]);

    let window = duration(card.window_ms.saturating_mul(1_000_000));
    let mut rows = vec![heads(&["ENGINE", "BUSY", &format!("LAST {}", window.to_uppercase())])];
    rows.extend(
        card.engines
            .iter()
            .map(|(engine, used)| row(&[&engine.name(), &duration(used.busy_ns), &percent(used.busy_permille)])),
    );
    let _ = write!(text, "\n{}", table(rows, &[1, 2]));
    if card.vms.is_empty() {
        text.push_str("\nno VMs\n");
        return text;
    }

    let mut rows = vec![heads(&[
        "VM",
        "WEIGHT",
        "GUARANTEE",
        "CAP",
        "CLASS",
        "MAX RUN",
        "ENTITLED",
        "QUEUED",
        "ON CARD",
        "STRIKES",
        "STATE",
    ])];
    rows.extend(card.vms.iter().map(|vm| {
        let VmShare { vm: name, time, queued, in_flight, strikes, .. } = vm;
        row(&[
            name,
            &time.weight,
            &percent(time.guarantee_permille),
            &percent(time.cap_permille),
            &class(time),
            &max_run(time),
            &percent(vm.entitled_permille),
            queued,
            in_flight,
            strikes,
            &state(vm),
        ])
    }));
    let _ = write!(text, "\n{}", table(rows, &[1, 2, 3, 5, 6, 7, 8, 9]));

    let mut rows = vec![heads(&["VM", "WEIGHT FOR COPIES", "GUARANTEE", "CAP", "ENTITLED"])];
    rows.extend(card.vms.iter().filter_map(|vm| {
        let [weight, guarantee, cap] = copies(&vm.time)?;
        let entitled = percent(vm.copies_entitled_permille.unwrap_or(vm.entitled_permille));
        Some(row(&[&vm.vm, &weight, &guarantee, &cap, &entitled]))
    }));
    if rows.len() > 1 {
        let _ = write!(text, "\n{}", table(rows, &[1, 2, 3, 4]));
    }

    let received = format!("LAST {}", window.to_uppercase());
    let mut rows = vec![heads(&[
        "VM",
        "ENGINE",
        "USED",
        &received,
        "SUBMITTED",
        "ENDED",
        "KILLED",
        "WAIT MEAN",
        "MEDIAN",
        "99 %",
        "MAX",
    ])];
    for (vm, (engine, used)) in card.vms.iter().flat_map(|vm| vm.engines.iter().map(move |engine| (vm, engine))) {
        if used.arrived == 0 {
            continue;
        }
        let wait = &used.wait;
        let [mean, median, most, max] = [wait.mean_ns, wait.p50_ns, wait.p99_ns, wait.max_ns].map(duration);
        let received = percent(used.received_permille);
        let [time, submitted, ended, killed] =
            [duration(used.used_ns), used.arrived.to_string(), used.completed.to_string(), used.killed.to_string()];
        rows.push(row(&[
            &vm.vm,
            &engine.name(),
            &time,
            &received,
            &submitted,
            &ended,
            &killed,
            &mean,
            &median,
            &most,
            &max,
        ]));
    }
    if rows.len() > 1 {
        let _ = write!(text, "\n{}", table(rows, &[2, 3, 4, 5, 6, 7, 8, 9, 10]));
    }

    let mut rows = vec![heads(&["VM", "CHANNEL", "ENGINE", "SUBMITTED", "WAITS FOR"])];
    rows.extend(card.vms.iter().flat_map(|vm| {
        vm.overdue.iter().map(|overdue| {
            let ago = format!("{} ago", duration(overdue.age_ms.saturating_mul(1_000_000)));
            row(&[&vm.vm, &overdue.channel, &overdue.engine.name(), &ago, &overdue.waits_for])
        })
    }));
    if rows.len() > 1 {
        let _ = write!(text, "\n{}", table(rows, &[1]));
    }
    text
}

/// Renders a virtual machine's share.
#[must_use]
pub fn vm_time(vm: &str, time: &VmTime) -> String {
    let mut rows = vec![
        row(&[&"VM", &vm]),
        row(&[&"weight", &time.weight]),
        row(&[&"guarantee", &percent(time.guarantee_permille)]),
        row(&[&"cap", &percent(time.cap_permille)]),
        row(&[&"class", &class(time)]),
        row(&[&"max run", &max_run(time)]),
    ];
    if let Some([weight, guarantee, cap]) = copies(time) {
        rows.extend([
            row(&[&"weight for copies", &weight]),
            row(&[&"  guarantee", &guarantee]),
            row(&[&"  cap", &cap]),
        ]);
    }
    table(rows, &[])
}

/// Renders the summary of a report.
#[must_use]
pub fn report(report: &Summary) -> String {
    let Summary { file, engine, vms, jain, .. } = report;
    let mut rows = vec![heads(&["VM", "ENTITLED", "RECEIVED"])];
    rows.extend(
        vms.iter().map(|vm| {
            row(&[&vm.vm, &format!("{:.1} %", vm.entitled_percent), &format!("{:.1} %", vm.received_percent)])
        }),
    );
    let jain = jain.map_or_else(|| NOTHING.to_owned(), |index| format!("{index:.3}"));
    format!("{}\nuse of {}, Jain's index {jain}, in {file}\n", table(rows, &[1, 2]), engine.name())
}

/// Renders the result of a replay.
#[must_use]
pub fn replay(replayed: &Replayed) -> String {
    let Replayed { events, length_ns, policy, recorded, uses } = replayed;
    let mut rows = vec![heads(&["VM", "ENGINE", "USED", "SHARE", "ENDED", "WAIT 50 %", "WAIT 99 %"])];
    rows.extend(uses.iter().map(|one| {
        vec![
            one.vm.clone(),
            one.engine.name().to_owned(),
            duration(one.used_ns),
            format!("{:.1} %", one.share_percent),
            one.completed.to_string(),
            duration(one.wait_p50_ns),
            duration(one.wait_p99_ns),
        ]
    }));
    let table = table(rows, &[2, 3, 4, 5, 6]);
    let what = if *recorded { "all decisions match the recording" } else { "the recorded work, rescheduled" };
    format!("{events} events in {}, {}: {what}\n\n{table}", duration(*length_ns), policy.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_parts_are_in_units_for_people() {
        let times = [0, 999, 1000, 1500, 30_000_000, 123_456_789, 2_000_000_000, 61_500_000_000];
        let expected = ["0 ns", "999 ns", "1 us", "1.5 us", "30 ms", "123 ms", "2 s", "61.5 s"];
        assert_eq!(times.map(duration), expected);
        assert_eq!([0, 5, 125, 1000].map(percent), ["0.0 %", "0.5 %", "12.5 %", "100.0 %"]);
    }

    #[test]
    fn every_setting_of_a_card_is_shown() {
        let mut rows = Vec::new();
        settings("", &serde_json::to_value(sched::Config::default()).unwrap(), &mut rows);
        for expected in [["policy", "band"], ["band.period", "30 ms"], ["band.free_wait", "12.5 %"], ["strikes", "3"]] {
            assert!(rows.iter().any(|row| row == &expected.map(str::to_owned)), "{expected:?} in {rows:?}");
        }
    }
}
