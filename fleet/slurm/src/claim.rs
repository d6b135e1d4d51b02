//! Converts a job's shards to a table that describes a tenant or a virtual machine.
//!
//! A job with N of a card's T shards is guaranteed N/T of the card's memory and time. The daemon can therefore
//! guarantee everything that Slurm allocates. In addition, the job can use idle resources: memory up to its requested
//! size, and time up to its cap.

use serde_json::{Map, Value, json};

use crate::granted::{Gpu, Granted};
use crate::options::{Arguments, Cap, Given};

/// Maximum weight.
const WEIGHT_MAX: u32 = 10_000;

/// A card managed by the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Name of the card.
    pub name: String,
    /// Set if the card serves tenants instead of virtual machines.
    pub cuda: bool,
    /// Memory shared by the card's users, in MiB.
    pub shared_mib: u64,
}

/// Returns the cards that a job's shards belong to, in Slurm's order.
///
/// # Errors
/// Returns an error if a card is unknown or has another kind, or if the shards of a vGPU are on several cards.
pub fn cards_of<'a>(
    arguments: &Arguments,
    given: &Given,
    gpus: &[Gpu],
    cards: &'a [Card],
) -> Result<Vec<&'a Card>, String> {
    let of_kind: Vec<&Card> = cards.iter().filter(|card| card.cuda != given.vgpu).collect();
    let kind = if given.vgpu { "vGPUs" } else { "CUDA programs" };
    let of_kind: Vec<&Card> = match arguments.cards.is_empty() {
        true => of_kind,
        false => {
            // The cards are in Slurm's order. The list includes cards of the other kind, so that its indices are
            // Slurm's card numbers.
            let named = arguments.cards.iter().map(|name| cards.iter().find(|card| card.name == *name));
            let named: Option<Vec<_>> = named.collect();
            named.ok_or(
                "plugstack.conf: `cards` names a card that the daemon does not have; see `mediatorctl card show`",
            )?
        }
    };
    let numbers: Vec<usize> = match gpus {
        [] => vec![0],
        gpus => gpus.iter().map(|gpu| gpu.index).collect(),
    };
    if given.vgpu && numbers.len() > 1 {
        return Err(format!("--vgpu: the shards are on cards {numbers:?}, expected one card; request fewer"));
    }
    let card = |number: usize| {
        let card = of_kind.get(number).copied().filter(|card| card.cuda != given.vgpu);
        card.ok_or_else(|| format!("the daemon has no card number {number} for {kind}; see `mediatorctl card show`"))
    };
    numbers.into_iter().map(card).collect()
}

/// Returns the number of a job's shards on each of its cards. For a single card, this is the number of all of the job's
/// shards. A tenant gets the same part of each of its cards, so for several cards, this is the smallest number.
#[must_use]
pub fn shards_per_card(granted: &Granted) -> u32 {
    match granted.gpus.as_slice() {
        [] | [_] => granted.shards,
        gpus => gpus.iter().map(|gpu| gpu.shards).min().unwrap_or(0),
    }
}

/// Creates the table for a job's tenant or virtual machine that has `shards` shards on each of its cards.
///
/// # Errors
/// Returns an error if the job has no shards or makes an invalid request.
pub fn table(
    arguments: &Arguments,
    given: &Given,
    shards: u32,
    cards: &[&Card],
    name: &str,
    user: u32,
) -> Result<Map<String, Value>, String> {
    // The smallest card limits the part of each card.
    let card = cards.iter().min_by_key(|card| card.shared_mib).ok_or("the job has no card")?;
    let all = arguments.shards;
    if shards == 0 {
        return Err("options for GPUs need shards: request some with --gres=shard:N".to_owned());
    }
    if shards > all {
        return Err(format!("{shards} shards, expected at most the {all} of a card (`shards` in plugstack.conf)"));
    }
    let chunk = arguments.chunk_mib;
    // Round down, so that the parts of all jobs fit on the card.
    let sure_mib = card.shared_mib.saturating_mul(shards.into()) / u64::from(all) / chunk * chunk;
    let asked_mib = given.memory_mib.unwrap_or(sure_mib).div_ceil(chunk).saturating_mul(chunk);
    if asked_mib == 0 {
        return Err(format!(
            "{shards} of {all} shards of {} MiB are less than {chunk} MiB; request more, or use --gpu-memory",
            card.shared_mib
        ));
    }
    if asked_mib > card.shared_mib {
        let shared = card.shared_mib;
        return Err(format!(
            "--gpu-memory: {asked_mib} MiB, expected at most the {shared} MiB of card `{}`",
            card.name
        ));
    }
    let permille = u32::try_from(u64::from(shards) * 1000 / u64::from(all)).unwrap_or(1000);
    let weight = given.weight.unwrap_or(shards.min(WEIGHT_MAX));
    let mut time = json!({ "weight": weight, "guarantee_permille": permille });
    if let Some(class) = &given.class {
        time["class"] = class.as_str().into();
    }
    let cap = given.cap.map(|cap| match cap {
        Cap::Shards => permille.max(1),
        Cap::Permille(cap) => cap.max(permille),
    });
    if let Some(cap) = cap {
        time["cap_permille"] = cap.into();
    }
    let socket = if given.vgpu { "vgpu.sock" } else { "cuda.sock" };
    if given.vgpu && given.share_group.is_some() {
        return Err("--gpu-share-group, expected a job without --vgpu: virtual machines take turns".to_owned());
    }
    if given.sharing.is_some() && given.share_group.is_none() {
        return Err("--gpu-sharing, expected it together with --gpu-share-group".to_owned());
    }
    if cards.len() > 1 && given.share_group.is_some() {
        return Err("--gpu-share-group, expected shards of one card: a group shares one card".to_owned());
    }
    let mut table = json!({
        "name": name,
        "vram_mib": asked_mib,
        "memory": { "quota_mib": asked_mib, "guarantee_mib": sure_mib.min(asked_mib), "weight": weight },
        "time": time,
        // Only the daemon can connect until ownership of the socket passes to the job's user.
        "mode": "0600",
    });
    // The sockets have their own folder, which the daemon creates and containers of the job mount.
    let folder = arguments.sockets.join(name);
    match cards {
        [card] => {
            table["card"] = card.name.as_str().into();
            table["socket"] = json!(folder.join(socket));
        }
        cards => {
            table["cards"] = cards.iter().map(|card| card.name.as_str()).collect();
            // Each card has a socket in the folder.
            table["socket"] = json!(folder);
        }
    }
    if let Some(group) = &given.share_group {
        // Jobs of different users do not trust each other, so each user has separate groups.
        table["share_group"] = format!("u{user}-{group}").into();
    }
    if let Some(mode) = &given.sharing {
        table["sharing"] = mode.as_str().into();
    }
    match table {
        Value::Object(table) => Ok(table),
        _ => Err("no table".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cards() -> Vec<Card> {
        let card = |name: &str, cuda, shared_mib| Card { name: name.to_owned(), cuda, shared_mib };
        vec![card("a", true, 1024), card("b", true, 4096), card("s", false, 960)]
    }

    fn made(given: &Given, shards: u32, card: &Card) -> Result<Map<String, Value>, String> {
        table(&Arguments { chunk_mib: 16, ..Arguments::default() }, given, shards, &[card], "slurm-7", 1000)
    }

    #[test]
    fn shards_are_a_guaranteed_part_of_memory_and_time() {
        let cards = cards();
        let quarter = made(&Given::new(), 25, &cards[0]).unwrap();
        assert_eq!(
            (&quarter["vram_mib"], &quarter["socket"]),
            (&256.into(), &"/run/gpu-mediator/slurm-7/cuda.sock".into())
        );
        assert_eq!(quarter["memory"], json!({ "quota_mib": 256, "guarantee_mib": 256, "weight": 25 }));
        assert_eq!(quarter["time"], json!({ "weight": 25, "guarantee_permille": 250 }));
        // Memory above the shards' part is not guaranteed. A size below that part is both the limit and the guarantee.
        let more =
            Given { memory_mib: Some(500), weight: Some(300), class: Some("interactive".into()), ..Given::new() };
        let more = made(&more, 25, &cards[0]).unwrap();
        assert_eq!(more["memory"], json!({ "quota_mib": 512, "guarantee_mib": 256, "weight": 300 }));
        assert_eq!(more["time"], json!({ "weight": 300, "guarantee_permille": 250, "class": "interactive" }));
        let less = Given { memory_mib: Some(64), cap: Some(Cap::Shards), ..Given::new() };
        let less = made(&less, 25, &cards[0]).unwrap();
        assert_eq!(less["memory"]["guarantee_mib"], 64);
        assert_eq!(less["time"]["cap_permille"], 250);
        // A cap below the guarantee has no effect.
        let low = Given { cap: Some(Cap::Permille(100)), ..Given::new() };
        assert_eq!(made(&low, 25, &cards[0]).unwrap()["time"]["cap_permille"], 250);
    }

    #[test]
    fn all_parts_that_are_handed_out_fit_together() {
        for shared_mib in [1000, 1024, 40_000, 81_920] {
            let card = Card { name: "a".into(), cuda: true, shared_mib };
            for parts in [vec![25; 4], vec![33, 33, 34], vec![1; 100], vec![99, 1], vec![7; 14]] {
                let given = Given { memory_mib: Some(64), ..Given::new() };
                let sure = parts.iter().map(|&shards| {
                    let one = made(&given, shards, &card).unwrap();
                    (
                        one["memory"]["guarantee_mib"].as_u64().unwrap(),
                        one["time"]["guarantee_permille"].as_u64().unwrap(),
                    )
                });
                let (memory, time) = sure.fold((0, 0), |(memory, time), one| (memory + one.0, time + one.1));
                assert!(memory <= shared_mib && time <= 1000, "{parts:?} of {shared_mib}: {memory} MiB, {time}");
            }
        }
    }

    #[test]
    fn impossible_job_request_is_rejected_with_cause() {
        let cards = cards();
        let asked = |mib| Given { memory_mib: Some(mib), ..Given::new() };
        for (given, shards, told) in [
            (asked(64), 0, "need shards"),
            (Given::new(), 101, "at most the 100 of a card"),
            (Given::new(), 1, "less than 16 MiB"),
            (asked(2000), 25, "--gpu-memory: 2000 MiB, expected at most the 1024 MiB of card `a`"),
        ] {
            let error = made(&given, shards, &cards[0]).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
    }

    #[test]
    fn cards_are_counted_as_slurm_counts() {
        let cards = cards();
        let find = |named: &[&str], vgpu, gpus: &[usize]| {
            let gpus: Vec<_> = gpus.iter().map(|&index| Gpu { index, shards: 5 }).collect();
            let arguments =
                Arguments { cards: named.iter().map(|&name| name.to_owned()).collect(), ..Arguments::default() };
            let found = cards_of(&arguments, &Given { vgpu, ..Given::new() }, &gpus, &cards);
            found.map(|found| found.iter().map(|card| card.name.as_str()).collect::<Vec<_>>().join(","))
        };
        assert_eq!(find(&[], false, &[]).as_deref(), Ok("a"));
        assert_eq!(find(&[], false, &[1]).as_deref(), Ok("b"));
        assert_eq!(find(&[], true, &[0]).as_deref(), Ok("s"));
        assert_eq!(find(&["b", "s", "a"], false, &[2]).as_deref(), Ok("a"));
        assert_eq!(find(&[], false, &[0, 1]).as_deref(), Ok("a,b"));
        assert_eq!(find(&["b", "s", "a"], false, &[0, 2]).as_deref(), Ok("b,a"));
        for (named, vgpu, gpus, told) in [
            (&[][..], false, &[2][..], "no card number 2 for CUDA programs"),
            (&[], false, &[0, 2], "no card number 2 for CUDA programs"),
            (&[], true, &[0, 1], "--vgpu: the shards are on cards [0, 1], expected one card"),
            (&["z"], false, &[0], "`cards` names a card"),
            (&["s"], false, &[0], "no card number 0 for CUDA programs"),
        ] {
            let error = find(named, vgpu, gpus).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
    }

    #[test]
    fn share_group_is_of_one_user_and_needs_cuda() {
        let cards = cards();
        let given = Given { share_group: Some("decoders".into()), sharing: Some("together".into()), ..Given::new() };
        let table = made(&given, 25, &cards[0]).unwrap();
        assert_eq!((&table["share_group"], &table["sharing"]), (&"u1000-decoders".into(), &"together".into()));
        let error = made(&Given { vgpu: true, ..given }, 25, &cards[2]).unwrap_err();
        assert!(error.contains("--gpu-share-group, expected a job without --vgpu"), "{error}");
        let error = made(&Given { sharing: Some("auto".into()), ..Given::new() }, 25, &cards[0]).unwrap_err();
        assert!(error.contains("expected it together with --gpu-share-group"), "{error}");
        assert!(!made(&Given::new(), 25, &cards[0]).unwrap().contains_key("share_group"));
    }

    #[test]
    fn job_on_several_cards_gets_the_same_part_of_each() {
        let mut cards = cards();
        cards[1].shared_mib = cards[0].shared_mib / 2;
        let both = [&cards[0], &cards[1]];
        let granted = |gpus: &[(usize, u32)]| Granted {
            shards: gpus.iter().map(|(_, shards)| shards).sum(),
            gpus: gpus.iter().map(|&(index, shards)| Gpu { index, shards }).collect(),
        };
        assert_eq!(shards_per_card(&granted(&[(0, 30), (1, 10)])), 10);
        assert_eq!(shards_per_card(&granted(&[(1, 30)])), 30);
        assert_eq!(shards_per_card(&Granted { shards: 7, gpus: Vec::new() }), 7);
        let arguments = Arguments { chunk_mib: 4, sockets: "/run/n1".into(), ..Arguments::default() };
        let made = |given: &Given| table(&arguments, given, 25, &both, "slurm-7", 1000);
        let found = made(&Given::new()).unwrap();
        assert_eq!((&found["cards"], found.get("card")), (&json!(["a", "b"]), None));
        assert_eq!((&found["socket"], &found["time"]["guarantee_permille"]), (&"/run/n1/slurm-7".into(), &250.into()));
        assert_eq!(found["vram_mib"], json!(cards[1].shared_mib / 4 / 4 * 4));
        let grouped = Given { share_group: Some("g".into()), ..Given::new() };
        assert!(made(&grouped).unwrap_err().contains("expected shards of one card"));
    }
}
