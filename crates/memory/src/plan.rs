//! How far a host can be over-committed, by what is seen of it now.
//!
//! Two limits. What guests use must fit somewhere: into memory, compressed, or on swap. And what they use all the time
//! must fit into memory, for what is looked at each second and lies on swap stalls its guest, on whatever device. Past
//! the first limit programs are killed, past the second a host stutters; then RAM has to be bought.

use serde::{Deserialize, Serialize};

use crate::config::ZIP_MAX_PERCENT;
use crate::level::wanted;
use crate::seen::Seen;
use crate::{MIB, human};

/// How much smaller pages become on average, where nothing was measured on this host.
const RATIO: f64 = 2.0;

/// What can be said.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Bytes of memory.
    pub total: u64,
    /// Bytes of it that guests can have: without the host's own programs and what should be available.
    pub for_guests: u64,
    /// Bytes all guests are assigned.
    pub assigned: u64,
    /// Bytes they use.
    pub used: u64,
    /// Bytes of that they are thought to use all the time.
    pub active: u64,
    /// Bytes they keep whatever happens.
    pub minimum: u64,
    /// Bytes balloons could take now without hurting anybody.
    pub balloons: u64,
    /// Bytes more that fit into memory compressed.
    pub compressed: u64,
    /// Bytes of swap that are free.
    pub swap_free: u64,
    /// Assigned over what guests can have.
    pub now: f64,
    /// How high that can be before anything is swapped out.
    pub without_swap: f64,
    /// How high before guests stall, with swap and compression as they are.
    pub at_most: f64,
    /// What would help, and what cannot.
    pub advice: Vec<String>,
}

/// Says how far it goes.
pub fn plan(seen: &Seen) -> Plan {
    let sum = |of: fn(&crate::Guest) -> u64| seen.guests.iter().map(of).sum::<u64>();
    let assigned = sum(|g| g.assigned);
    let used = sum(crate::Guest::used);
    let active = sum(|g| g.active);
    let resident = sum(|g| g.resident);
    let others = seen
        .total
        .saturating_sub(seen.available)
        .saturating_sub(resident);
    let for_guests = seen
        .total
        .saturating_sub(others)
        .saturating_sub(wanted(seen.total));
    let balloons = seen
        .guests
        .iter()
        .filter_map(|g| {
            let (has, inside) = (g.balloon?, g.inside?);
            let spare = inside.available.saturating_sub(2 * g.reserve());
            Some(spare.min(has.saturating_sub(g.minimum)))
        })
        .sum();
    let can_compress = seen.zswap.is_some() && seen.swap_total > 0;
    let ratio = seen
        .zswap
        .as_ref()
        .and_then(|z| Some((z.stored?, z.pool?)))
        .filter(|(stored, pool)| *stored > 64 * MIB && *pool > 0)
        .map_or(RATIO, |(stored, pool)| {
            (stored as f64 / pool as f64).clamp(1.0, 8.0)
        });
    let pool = seen.total as f64 * ZIP_MAX_PERCENT as f64 / 100.0;
    let compressed = if can_compress {
        ((ratio - 1.0) * pool).min(seen.swap_free as f64) as u64
    } else {
        0
    };
    let over = |bytes: u64| bytes as f64 / for_guests.max(1) as f64;
    let part = |bytes: u64| (bytes as f64 / assigned.max(1) as f64).clamp(0.02, 1.0);
    let now = over(assigned);
    // Of what more guests like these are assigned, the same part is used.
    let without_swap = over(for_guests) / part(used);
    let everywhere = over(
        for_guests
            .saturating_add(compressed)
            .saturating_add(seen.swap_free),
    ) / part(used);
    let at_most = everywhere
        .min(over(for_guests) / part(active))
        .max(without_swap);
    let mut plan = Plan {
        total: seen.total,
        for_guests,
        assigned,
        used,
        active,
        minimum: sum(|g| g.minimum),
        balloons,
        compressed,
        swap_free: seen.swap_free,
        now,
        without_swap,
        at_most,
        advice: Vec::new(),
    };
    plan.advice = advice(seen, &plan);
    plan
}

fn names<'a>(guests: impl Iterator<Item = &'a crate::Guest>) -> Option<String> {
    const MOST: usize = 5;
    let all: Vec<&str> = guests.map(|g| g.name.as_str()).collect();
    match all.len() {
        0 => None,
        n if n > MOST => Some(format!("{} and {} more", all[..MOST].join(", "), n - MOST)),
        _ => Some(all.join(", ")),
    }
}

/// Guests for which one of the means is not there, each in a sentence.
pub fn gaps(seen: &Seen) -> Vec<String> {
    let guests = || seen.guests.iter();
    let asked = || guests().filter(|g| !g.exempt);
    let mut said = Vec::new();
    if let Some(who) = names(asked().filter(|g| g.balloon.is_none())) {
        said.push(format!(
            "no balloon in {who}: nothing can be taken back but by swapping (device virtio-balloon-pci)"
        ));
    }
    let silent = |g: &&crate::Guest| g.balloon.is_some() && g.inside.is_none();
    if let Some(who) = names(asked().filter(silent)) {
        said.push(format!(
            "no statistics from {who}: their balloons are left alone, for nobody would know if they were short (driver virtio_balloon in the guest; in Windows its service, too)"
        ));
    }
    let off = |g: &&crate::Guest| g.balloon.is_some() && g.reporting == Some(false);
    if let Some(who) = names(asked().filter(off)) {
        said.push(format!(
            "free-page reporting is off in {who}: what they free stays taken until a balloon fetches it (free-page-reporting=on; Windows has none)"
        ));
    }
    if let Some(who) = names(guests().filter(|g| g.exempt)) {
        said.push(format!("nothing is taken from {who}, as the settings say"));
    }
    if let Some(zswap) = seen.zswap.as_ref().filter(|z| z.is_in_vain()) {
        said.push(format!(
            "compressed pages take {} and hold {}: they do not become smaller",
            human(zswap.pool.unwrap_or(0)),
            human(zswap.stored.unwrap_or(0))
        ));
    }
    said
}

fn advice(seen: &Seen, plan: &Plan) -> Vec<String> {
    let mut said = gaps(seen);
    if seen.guests.is_empty() {
        said.insert(
            0,
            "no guest is known: name their QMP sockets in [memory] of hearth.toml, or with --guest"
                .to_owned(),
        );
        return said;
    }
    if seen.swap_total == 0 {
        said.push(
            "there is no swap: hearth swap on --size 8G makes some on the flash, and compression needs it".to_owned(),
        );
    }
    if seen.zswap.is_none() {
        said.push("this kernel does not compress before it swaps (CONFIG_ZSWAP)".to_owned());
    }
    if plan.active > plan.for_guests {
        said.push(format!(
            "guests use {} all the time, and {} of memory are there for them: buy RAM, or run fewer",
            human(plan.active),
            human(plan.for_guests)
        ));
    } else if plan.minimum > plan.for_guests.saturating_add(plan.swap_free) {
        said.push(
            "guests' minimums together are more than memory and swap: not all can be kept"
                .to_owned(),
        );
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Guest, Inside, Zswap};

    fn guest(name: &str, assigned: u64, used: u64, active: u64) -> Guest {
        Guest {
            name: name.into(),
            pid: Some(1),
            assigned: assigned * MIB,
            resident: used * MIB,
            active: active * MIB,
            balloon: Some(assigned * MIB),
            inside: Some(Inside {
                available: (assigned - used) * MIB,
                swap_in: 0,
            }),
            reporting: Some(true),
            maximum: assigned * MIB,
            share: 1,
            ..Guest::default()
        }
    }

    fn host() -> Seen {
        Seen {
            total: 8000 * MIB,
            available: 4000 * MIB,
            swap_total: 8000 * MIB,
            swap_free: 8000 * MIB,
            zswap: Some(Zswap::default()),
            guests: vec![guest("a", 4000, 2000, 500), guest("b", 4000, 2000, 500)],
            ..Seen::default()
        }
    }

    #[test]
    fn more_guests_like_these() {
        let plan = plan(&host());
        assert_eq!(plan.assigned, 8000 * MIB);
        assert_eq!(plan.for_guests, 7520 * MIB);
        // Half is used: twice as much fits; an eighth is in use all the time, so swap allows for more.
        assert!((plan.without_swap - 2.0).abs() < 0.01, "{plan:?}");
        assert!(plan.at_most > 4.0 && plan.at_most < 8.1, "{plan:?}");
        assert_eq!(plan.advice, Vec::<String>::new());
    }

    #[test]
    fn exempt_guests_and_vain_compression_are_told() {
        let mut seen = host();
        seen.guests[0].exempt = true;
        seen.guests[0].balloon = None;
        seen.zswap = Some(Zswap {
            on: true,
            pool_max: 100 * MIB,
            pool: Some(90 * MIB),
            stored: Some(95 * MIB),
            ..Zswap::default()
        });
        let all = gaps(&seen).join("\n");
        assert!(all.contains("nothing is taken from a") && !all.contains("no balloon"));
        assert!(all.contains("do not become smaller"), "{all}");
        // Half of what is stored is saved: that is what it is for.
        seen.zswap.as_mut().unwrap().stored = Some(180 * MIB);
        assert!(!gaps(&seen).join("\n").contains("smaller"));
    }

    #[test]
    fn when_ram_has_to_be_bought_is_said() {
        let mut seen = host();
        for guest in &mut seen.guests {
            guest.active = 3900 * MIB;
            guest.resident = 3950 * MIB;
            guest.inside = None;
        }
        seen.available = 100 * MIB;
        seen.swap_total = 0;
        seen.swap_free = 0;
        let plan = plan(&seen);
        let all = plan.advice.join("\n");
        assert!(
            all.contains("buy RAM") && all.contains("no swap") && all.contains("a, b"),
            "{all}"
        );
        assert_eq!(plan.compressed, 0);
        let none = super::plan(&Seen::default());
        assert!(none.advice[0].contains("--guest"));
        assert!(none.at_most.is_finite() && none.now.is_finite());
    }
}
