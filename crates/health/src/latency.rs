//! Devices that have become slow: a drive that dies often answers late before it does not answer.
//!
//! What is slow depends on the device, so it is compared with itself over the day before, and with its peers:
//! devices of the same sort that work at the same time. Two of them say nothing about which is the odd one.

use crate::model::Reason;

/// Operations below which a mean says nothing.
pub const OPS_MIN: u64 = 50;
/// So many times slower than over the day.
pub const OWN_FACTOR: f64 = 8.0;
/// So many times slower than the middle one of its peers.
pub const PEER_FACTOR: f64 = 6.0;
/// Peers that make a middle.
pub const PEERS_MIN: usize = 3;
/// Microseconds below which nothing is slow: a queue behind a burst of writes takes so long.
pub const SLOW_US: f64 = 100_000.0;

/// How a device answered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answers {
    /// Its name.
    pub name: String,
    /// Operations lately.
    pub ops: u64,
    /// Their mean, in microseconds.
    pub mean_us: f64,
    /// Operations over the day.
    pub day_ops: u64,
    /// Their mean, in microseconds.
    pub day_mean_us: f64,
}

impl Answers {
    /// Without what happened lately, so that it does not hide itself.
    fn before(&self) -> Option<f64> {
        let ops = self.day_ops.saturating_sub(self.ops);
        let sum = self.day_mean_us * self.day_ops as f64 - self.mean_us * self.ops as f64;
        (ops >= OPS_MIN).then(|| (sum / ops as f64).max(0.0))
    }
}

/// What is to be said of `one`, among all devices of its sort.
pub fn judge(one: &Answers, all: &[Answers]) -> Vec<Reason> {
    if one.ops < OPS_MIN || one.mean_us < SLOW_US {
        return Vec::new();
    }
    let ms = one.mean_us / 1000.0;
    let mut peers: Vec<f64> = (all.iter())
        .filter(|p| p.name != one.name && p.ops >= OPS_MIN)
        .map(|p| p.mean_us)
        .collect();
    peers.sort_by(f64::total_cmp);
    let middle = peers
        .get(peers.len() / 2)
        .copied()
        .filter(|_| peers.len() >= PEERS_MIN);
    let slow = |than: String| {
        Reason::degraded(
            "slow",
            format!("reads take {ms:.0} ms, {than}"),
            "see the kernel's log for resets and errors, and what else uses the device",
        )
    };
    let own = one
        .before()
        .filter(|before| one.mean_us >= before * OWN_FACTOR);
    if let Some(before) = own {
        return vec![slow(format!(
            "and took {:.1} ms over the day",
            before / 1000.0
        ))];
    }
    let odd = middle.filter(|middle| one.mean_us >= middle * PEER_FACTOR);
    odd.map(|middle| {
        slow(format!(
            "while others of its sort take {:.1} ms",
            middle / 1000.0
        ))
    })
    .into_iter()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(name: &str, mean_us: f64, day_mean_us: f64) -> Answers {
        Answers {
            name: name.to_owned(),
            ops: 100,
            mean_us,
            day_ops: 10_000,
            day_mean_us,
        }
    }

    #[test]
    fn slow_is_compared_with_itself_and_with_others() {
        let dying = answers("a", 400_000.0, 12_000.0);
        let said = judge(&dying, std::slice::from_ref(&dying));
        assert!(said[0].what.contains("400 ms, and took 8.1 ms"), "{said:?}");
        // Always slow: only its peers can tell.
        let slow = answers("a", 400_000.0, 400_000.0);
        let mut all = vec![
            slow.clone(),
            answers("b", 9_000.0, 9_000.0),
            answers("c", 9_000.0, 9_000.0),
        ];
        assert_eq!(judge(&slow, &all), [], "two peers have no middle");
        all.push(answers("d", 11_000.0, 9_000.0));
        assert!(judge(&slow, &all)[0].what.contains("others"));
        assert_eq!(judge(&all[3], &all), []);
    }

    #[test]
    fn fast_and_idle_devices_are_left_alone() {
        let fast = answers("a", 900.0, 10.0);
        assert_eq!(judge(&fast, &[]), []);
        let idle = Answers {
            ops: 3,
            ..answers("a", 900_000.0, 10.0)
        };
        assert_eq!(judge(&idle, &[]), []);
    }
}
