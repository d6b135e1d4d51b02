//! Profiles: their settings, and how many more instances of them fit on the cards.

use clap::Subcommand;

use api::{Capacity, Profile, ProfileList};

use super::Form;
use super::client::{self, Client, ClientError};
use super::output::{self, NOTHING, heads};
use super::watch::Watch;

#[derive(Clone, Debug, Subcommand)]
pub(super) enum ProfileCommand {
    /// Lists the profiles, and how many more instances of each fit on each card
    List {
        #[command(flatten)]
        watch: Watch,
    },
    /// Shows one profile in detail, and the resource of each card that limits further instances
    Show {
        /// Name of the profile
        name: String,
        #[command(flatten)]
        watch: Watch,
    },
}

pub(super) fn answer(client: &Client, form: Form, command: ProfileCommand) -> Result<String, ClientError> {
    match command {
        ProfileCommand::List { .. } => {
            let list: ProfileList = client.get("/v1/profiles")?;
            Ok(form.render(&list, |list| profiles(&list.profiles)))
        }
        ProfileCommand::Show { name, .. } => {
            let profile: Profile = client.get(&format!("/v1/profiles/{}", client::segment(&name)))?;
            Ok(form.render(&profile, show))
        }
    }
}

fn or_nothing(value: Option<impl ToString>) -> String {
    value.map_or_else(|| NOTHING.to_owned(), |value| value.to_string())
}

fn class(profile: &Profile) -> String {
    let class = profile.spec.class.and_then(|class| serde_json::to_value(class).ok());
    or_nothing(class.as_ref().and_then(|class| class.as_str()))
}

fn profiles(profiles: &[Profile]) -> String {
    if profiles.is_empty() {
        return "no profiles\n".to_owned();
    }
    let mut rows = vec![heads(&["NAME", "MIB", "WEIGHT", "CLASS", "CARD", "USED BY", "LEFT"])];
    for profile in profiles {
        rows.extend(profile.cards.iter().map(|Capacity { card, users, left, .. }| {
            let spec = &profile.spec;
            let own = [spec.name.clone(), spec.vram_mib.to_string(), or_nothing(spec.weight), class(profile)];
            own.into_iter().chain([card.clone(), users.len().to_string(), left.to_string()]).collect()
        }));
    }
    output::table(rows, &[1, 2, 5, 6])
}

fn show(profile: &Profile) -> String {
    let spec = &profile.spec;
    let mib = |mib: Option<u64>| mib.map_or_else(|| NOTHING.to_owned(), |mib| format!("{mib} MiB"));
    let permille =
        |part: Option<u32>| part.map_or_else(|| NOTHING.to_owned(), |part| format!("{}.{}%", part / 10, part % 10));
    let rows = [
        ("name", spec.name.clone()),
        ("memory", format!("{} MiB", spec.vram_mib)),
        ("  quota", mib(spec.memory.quota_mib)),
        ("  guarantee", mib(spec.memory.guarantee_mib)),
        ("  swap cap", mib(spec.memory.swap_cap_mib)),
        ("weight", or_nothing(spec.weight)),
        ("  of memory", or_nothing(spec.memory.weight.or(spec.weight))),
        ("class", class(profile)),
        ("guarantee of time", permille(spec.time.guarantee_permille)),
        ("cap of time", permille(spec.time.cap_permille)),
        ("channels", or_nothing(spec.channels)),
    ];
    let mut text = output::table(rows.map(|(name, value)| vec![name.to_owned(), value]).into(), &[]);
    let mut rows = vec![heads(&["CARD", "KIND", "LEFT", "USED BY", "WHAT THE CARD LACKS FOR MORE"])];
    rows.extend(profile.cards.iter().map(|Capacity { card, of, users, left, lacks }| {
        let users = if users.is_empty() { NOTHING.to_owned() } else { users.join(" ") };
        vec![card.clone(), of.clone(), left.to_string(), users, lacks.clone()]
    }));
    text.push('\n');
    text + &output::table(rows, &[2])
}
