use crate::workers::{
    CLASSES, Class, NotTaken, RUNNING_MAX, RUNNING_MAX_SPOT, Spot, WAITING_MAX, Workers,
};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Far longer than anything here takes, unless it hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// Jobs that hang until the gate is dropped, and say when they begin.
struct Gate {
    workers: Arc<Workers>,
    began: Sender<usize>,
    begun: Receiver<usize>,
    shut: Arc<Mutex<Receiver<()>>>,
    opens: Option<Sender<()>>,
}

impl Gate {
    fn new() -> Gate {
        let (began, begun) = channel();
        let (opens, shut) = channel();
        Gate {
            workers: Arc::default(),
            began,
            begun,
            shut: Arc::new(Mutex::new(shut)),
            opens: Some(opens),
        }
    }

    /// A job that hangs.
    fn hang(&self, spot: &Spot, class: Class, number: usize) -> Result<(), NotTaken> {
        let (began, shut) = (self.began.clone(), self.shut.clone());
        self.workers.run(spot, class, move || {
            let _ = began.send(number);
            // One has the lock and waits for the gate, the others for the lock.
            let _ = shut.lock().map(|gate| gate.recv());
        })
    }

    /// Is a job come to that ends at once?
    fn passes(&self, spot: &Spot, class: Class) -> bool {
        let (told, done) = channel();
        let tell = move || {
            let _ = told.send(());
        };
        self.workers.run(spot, class, tell).unwrap();
        done.recv_timeout(LIMIT).is_ok()
    }

    /// So many have begun since.
    fn begin(&self, count: usize) -> Vec<usize> {
        let begun = (0..count).map(|_| self.begun.recv_timeout(LIMIT).expect("it begins"));
        let mut begun: Vec<usize> = begun.collect();
        begun.sort_unstable();
        begun
    }

    fn open(&mut self) {
        self.opens = None;
    }
}

#[test]
fn what_hangs_at_one_spot_holds_up_no_other() {
    let mut gate = Gate::new();
    let (dead, sound) = (Spot::new("/dead"), Spot::new("/sound"));
    for number in 0..40 {
        gate.hang(&dead, Class::Asked, number).unwrap();
    }
    let most = RUNNING_MAX_SPOT[Class::Asked as usize];
    assert_eq!(gate.begin(most), (0..most).collect::<Vec<_>>());
    assert_eq!(gate.workers.census().running.iter().sum::<usize>(), most);
    for class in CLASSES {
        assert!(gate.passes(&sound, class));
    }
    // What must be done there has workers kept for it.
    gate.hang(&dead, Class::Due, 100).unwrap();
    assert_eq!(gate.begin(1), [100]);
    // The rest is come to when the spot answers again.
    gate.open();
    assert_eq!(gate.begin(40 - most), (most..40).collect::<Vec<_>>());
}

#[test]
fn what_nobody_asked_for_leaves_room_for_what_somebody_did_and_that_for_questions() {
    let gate = Gate::new();
    let mut number = 0;
    let mut fill = |class: Class, expected: usize| {
        // Each spot by itself is far from full, and there are more jobs than may run.
        for spot in 0..RUNNING_MAX[3] {
            let spot = Spot::new(format!("{class:?}{spot}"));
            gate.hang(&spot, class, number).unwrap();
            number += 1;
        }
        gate.begin(expected);
        assert_eq!(gate.workers.census().running[class as usize], expected);
    };
    fill(Class::Background, 192);
    fill(Class::Asked, 48);
    fill(Class::Due, 8);
    assert!(gate.passes(&Spot::new("here"), Class::Answer));
    fill(Class::Answer, 8);
    assert_eq!(gate.workers.census().threads, RUNNING_MAX[3]);
}

#[test]
fn spots_take_turns() {
    let gate = Gate::new();
    let most = RUNNING_MAX[Class::Asked as usize];
    for number in 0..most {
        let spot = Spot::new(number.to_string());
        gate.hang(&spot, Class::Asked, number).unwrap();
    }
    gate.begin(most);
    // No worker is left for these.
    let (told, order) = channel();
    let wait = |spot: &str| {
        let (told, name) = (told.clone(), spot.to_owned());
        let tell = move || told.send(name).unwrap();
        gate.workers
            .run(&Spot::new(spot), Class::Asked, tell)
            .unwrap();
    };
    (0..3).for_each(|_| wait("crowded"));
    wait("a");
    wait("b");
    // One is.
    gate.opens.as_ref().unwrap().send(()).unwrap();
    let order: Vec<String> = (0..5).map(|_| order.recv_timeout(LIMIT).unwrap()).collect();
    assert_eq!(order, ["crowded", "a", "b", "crowded", "crowded"]);
}

#[test]
fn a_queue_that_is_full_is_refused_with_its_spot_and_a_remedy() {
    let gate = Gate::new();
    let dead = Spot::new("/dead");
    let most = RUNNING_MAX_SPOT[Class::Asked as usize] + WAITING_MAX[Class::Asked as usize];
    for number in 0..most {
        gate.hang(&dead, Class::Asked, number).unwrap();
    }
    let refused = gate.hang(&dead, Class::Asked, most).unwrap_err();
    assert!(refused.to_string().contains("/dead"), "{refused}");
    assert!(refused.remedy().contains("hangs"));
    assert!(gate.passes(&Spot::new("/sound"), Class::Asked));
}

#[test]
fn a_thread_is_used_again_and_one_job_does_not_wait_behind_another() {
    let gate = Gate::new();
    let spot = Spot::new("/a");
    for _ in 0..100 {
        assert!(gate.passes(&spot, Class::Asked));
        // It has told of its end before it came to it.
        while gate.workers.census().idle == 0 {
            std::thread::yield_now();
        }
    }
    assert_eq!(gate.workers.census().threads, 1);
    gate.hang(&spot, Class::Asked, 1).unwrap();
    gate.hang(&spot, Class::Asked, 2).unwrap();
    assert_eq!(gate.begin(2), [1, 2]);
}

#[test]
fn a_job_that_panics_gives_its_place_back() {
    let gate = Gate::new();
    let spot = Spot::new("/a");
    for _ in 0..40 {
        let panics = || std::panic::resume_unwind(Box::new("no"));
        gate.workers.run(&spot, Class::Background, panics).unwrap();
    }
    assert!(gate.passes(&spot, Class::Background));
}

#[test]
fn the_end_waits_for_nothing_that_hangs_and_tells_those_who_wait() {
    let gate = Gate::new();
    let dead = Spot::new("/dead");
    for number in 0..14 {
        gate.hang(&dead, Class::Asked, number).unwrap();
    }
    gate.begin(14);
    let (told, waiting) = channel::<()>();
    gate.workers
        .run(&dead, Class::Asked, move || drop(told))
        .unwrap();
    let Gate { workers, opens, .. } = gate;
    drop(Arc::into_inner(workers).unwrap());
    // Its work was dropped, and with it the other end.
    assert!(
        waiting
            .recv_timeout(LIMIT)
            .is_err_and(|e| e == std::sync::mpsc::RecvTimeoutError::Disconnected)
    );
    drop(opens);
}
