/* The control plane of a run: election, proposal, forming, commit, re-join and drain. README.md maps it to the code.

   Two agents and four workers. Worker w is on node w / 2 and hosts stage w % 2, so that a death leaves a peer on the
   other node. Numbers of generations and steps begin with 1; 0 stands for "before the first".

   A message that only changes what its receiver knows is read where the receiver acts: `told` holds the standing orders
   of each leader, and `generation`, `at`, `reported` and so on are the last words of a process. Delays are the freedom
   to act later. A leader writes to etcd and tells in separate steps, between which it may die or lose its role. */

#ifndef STEPS
#define STEPS 2     /* iterations of the run; at most so many: */
#endif
#ifndef FAULTS
#define FAULTS 1    /* deaths of workers and nodes, lost roles, false suspicions, repeated iterations */
#endif
#ifndef DRAINS
#define DRAINS 1    /* requests to drain a worker */
#endif
#ifndef RESTARTS
#define RESTARTS 1  /* dead workers that are started again */
#endif
#ifndef MUTANT
#define MUTANT 0    /* a defect to be found; README.md lists them */
#endif

#define ALL 15
#define NONE 15     /* no state */
#define NOBODY 2    /* no agent */
#define bit(w) (1 << (w))
#define has(set, w) (((set) >> (w)) & 1)
#define node(w) ((w) / 2)
#define hosts(w) (5 << ((w) % 2))               /* of the worker's stage */
#define lost(set) (((set) & 5) == 0 || ((set) & 10) == 0)
#define every(P) (P(0) && P(1) && P(2) && P(3))
#define some(P) (P(0) || P(1) || P(2) || P(3))

mtype = { abandoned, proposed, forming, running, ended }                  /* phases of a generation */
#define settled 0       /* states of a process, in their order */
#define acknowledged 1
#define formed 2
#define trains 3
#define done 4
mtype = { decide, write_cursor, write_record, write_lost, write_done, tell }    /* what a leader does next */

typedef Register {
  byte generation, live, joining, incarnations, first, committed, last, gone;
  mtype phase
}

/* etcd. */
Register written;
byte role = NOBODY;
bool outcome;        /* the run has ended, or needs a checkpoint */

/* Agents. */
bool up[2] = true, leads[2];
byte link[2] = NOBODY;
Register mind[2];               /* what a leader thinks */
Register told[2];               /* its standing orders */
Register nothing;
byte kills[2];
mtype next[2];

/* Processes. The restarted process of a worker has incarnation 1. */
byte alive = ALL, incarnation;
byte generation[4], at[4], reported[4], begun[4];
byte state[4];

byte faults = FAULTS, drains = DRAINS, restarts = RESTARTS, asked;

/* For assertions: workers that a fault has struck, the generation that committed each step, and the one in which a
   worker has computed the step that it is at. */
byte struck, committed_by[STEPS + 1], stepped_in[4];

inline copy(to, from) {
  to.generation = from.generation; to.live = from.live; to.joining = from.joining; to.phase = from.phase;
  to.incarnations = from.incarnations; to.first = from.first; to.committed = from.committed; to.last = from.last;
  to.gone = from.gone
}

#define has_part(w) (!has(written.live, w) || \
                     (generation[w] == written.generation && reported[w] > written.committed))

/* The end of a process: its last words stay with its agent. */
inline end_process(w) {
  alive = alive & ~bit(w); at[w] = NONE; stepped_in[w] = 0;
  if
  :: MUTANT != 11 -> kills[0] = kills[0] & ~bit(w); kills[1] = kills[1] & ~bit(w)
  :: else
  fi
}

/* The last words about a generation that is over. */
inline forget(w) {
  if
  :: !has(alive, w) && !has(written.live, w) -> generation[w] = 0; reported[w] = 0; begun[w] = 0; state[w] = settled
  :: else
  fi
}

inline step_down(a) {
  leads[a] = false; link[a] = NOBODY; next[a] = decide; kills[a] = 0; copy(mind[a], nothing); copy(told[a], nothing)
}

/* What the leader of agent a knows. */
#define me mind[a]
#define linked(w) (link[node(w)] == a)
#define is_live(w) has(me.live, w)
#define is_dead(w) (is_live(w) && (!up[node(w)] || has(incarnation, w) != has(me.incarnations, w) \
                                   || (linked(w) && !has(alive, w))))
#define dead(w) (is_dead(w) << (w))
#define DEAD (dead(0) | dead(1) | dead(2) | dead(3))
#define said(w) (linked(w) && generation[w] == me.generation)
#define has_acknowledged(w) ((MUTANT == 3 && w == 1) || !is_live(w) || (said(w) && state[w] != settled))
#define has_formed(w) (!is_live(w) || (said(w) && state[w] >= formed))
#define has_reported(w) ((MUTANT == 2 && w == 1) || !is_live(w) || (said(w) && reported[w] > me.committed))
#define is_ready(w) (!is_live(w) && linked(w) && has(alive, w) && has(incarnation, w) && !has(me.incarnations, w) \
                     && !has(me.gone, w) && !has(asked, w))
#define ready(w) (is_ready(w) << (w))
#define READY (ready(0) | ready(1) | ready(2) | ready(3))
#define may_leave(w) (is_live(w) && has(asked, w) && linked(w) && (MUTANT == 5 || !lost(holders & ~bit(w))))
#define is_stray(w) (!is_live(w) && linked(w) && has(alive, w) && has(incarnation, w) == has(me.incarnations, w) \
                     && !has(kills[a], w) && !has(me.gone, w))
#define stray(w) (is_stray(w) << (w))
#define STRAYS (stray(0) | stray(1) | stray(2) | stray(3))
/* Whether the loss of a stage costs no healthy process that still has its state. */
#define is_excused(w) ((holders & hosts(w)) || !has(alive & ~struck, w) || at[w] == NONE || \
                       has(me.gone | me.joining, w))
#define has_ended(w) (!is_live(w) || is_dead(w) || (linked(w) && state[w] == done))
#define holders (me.live & ~me.joining)

inline end_generation() {
  if
  :: me.phase == running -> me.phase = ended; next[a] = write_cursor
  :: me.phase == proposed || me.phase == forming -> me.phase = abandoned; next[a] = write_cursor
  :: else
  fi
}

inline fence(set) {
  me.live = me.live & ~(set); me.joining = me.joining & me.live;
  end_generation()
}

inline release(w) {
  if
  :: may_leave(w) -> me.live = me.live & ~bit(w); me.joining = me.joining & ~bit(w); me.gone = me.gone | bit(w)
  :: else
  fi
}

inline suspect(w) {
  atomic {
    leads[a] && next[a] == decide && faults && me.committed < STEPS && me.phase != ended && me.phase != abandoned &&
    is_live(w) && linked(w) && has(alive, w) && !is_dead(w) ->
    faults--; struck = struck | bit(w); fence(bit(w))
  }
}

inline restart(w) {
  atomic {
    leads[a] && next[a] == decide && me.phase == running && restarts && me.committed < STEPS && !is_live(w) &&
    !has(alive, w) && !has(incarnation, w) && linked(w) && up[node(w)] && !has(me.gone, w) ->
    restarts--; incarnation = incarnation | bit(w); alive = alive | bit(w); struck = struck & ~bit(w);
    generation[w] = me.generation; state[w] = settled; reported[w] = 0; begun[w] = 0
  }
}

proctype agent(byte a) {
end:
  do  /* The role. */
  :: atomic { up[a] && !leads[a] && role == NOBODY && !outcome ->
      role = a; leads[a] = true; link[a] = a; copy(me, written);
      if
      :: me.generation == 0 -> me.live = ALL; me.phase = ended
      :: me.phase == running || me.phase == ended || (MUTANT == 9 && me.generation) -> me.joining = 0
      :: else
      fi;
      if
      :: me.phase == proposed -> me.phase = abandoned; next[a] = write_cursor
      :: else
      fi;
      if
      :: next[a] == decide && me.generation && MUTANT != 10 -> copy(told[a], me)
      :: else
      fi }
  :: atomic { up[a] && !leads[a] && role != NOBODY && link[a] != role && !outcome -> link[a] = role }
  :: atomic { leads[a] && role != a && !outcome -> step_down(a) }

  /* The register. */
  :: atomic { leads[a] && (next[a] == write_cursor || next[a] == write_record) && !outcome ->
      if
      :: role != a && MUTANT != 1 -> step_down(a)
      :: else ->
          assert(role == a);
          assert(me.committed == written.committed || me.committed == written.committed + 1);
          if
          :: me.committed > written.committed ->
              assert(written.generation == me.generation && written.phase == running);
              assert(every(has_part));
              committed_by[me.committed] = me.generation
          :: else
          fi;
          if
          :: next[a] == write_record ->
              assert(me.generation == written.generation + 1);
              copy(written, me);
              forget(0); forget(1); forget(2); forget(3)
          :: else ->
              assert(me.generation == written.generation);
              written.phase = (me.phase == forming -> proposed : me.phase);
              written.committed = me.committed; written.last = me.last; written.gone = me.gone
          fi;
          next[a] = tell
      fi }
  :: atomic { leads[a] && next[a] == tell && !outcome -> copy(told[a], me); next[a] = decide;
      if
      :: me.phase == running -> me.joining = 0
      :: else
      fi }
  :: atomic { leads[a] && (next[a] == write_done || next[a] == write_lost) && !outcome ->
      if
      :: role != a -> step_down(a)
      :: else ->
          assert(next[a] == write_done -> written.committed == STEPS : every(is_excused));
          outcome = true
      fi }

  /* Decisions. */
  :: atomic { leads[a] && next[a] == decide && DEAD && me.committed < STEPS ->
      fence(DEAD) }
  :: atomic { leads[a] && next[a] == decide && (me.phase == ended || me.phase == abandoned) &&
              lost(holders) -> next[a] = write_lost }
  :: atomic { leads[a] && next[a] == decide && (me.phase == ended || me.phase == abandoned) && !DEAD &&
              !lost(holders) ->
      release(0); release(1); release(2); release(3);
      me.joining = me.joining | READY; me.live = me.live | me.joining;
      me.incarnations = me.incarnations | me.joining;
      if
      :: MUTANT == 6 -> told[a].gone = me.gone
      :: else
      fi;
      me.generation++; me.first = me.committed + 1; me.last = 0; me.phase = proposed; next[a] = write_record }
  :: atomic { leads[a] && next[a] == decide && me.phase == proposed && every(has_acknowledged) ->
      me.phase = forming; copy(told[a], me) }
  :: atomic { leads[a] && next[a] == decide && me.phase == forming && every(has_formed) ->
      me.phase = running; next[a] = write_cursor }
  :: atomic { leads[a] && next[a] == decide && me.phase == running && me.committed < STEPS &&
              (!me.last || me.last > me.committed) && every(has_reported) ->
      me.committed++; next[a] = write_cursor;
      if
      :: MUTANT == 7 -> told[a].committed = me.committed
      :: else
      fi;
      if
      :: !me.last && (some(may_leave) || READY) ->
          me.last = (me.committed == me.first || me.committed == STEPS -> me.committed : me.committed + 1)
      :: else
      fi }
  :: atomic { leads[a] && next[a] == decide && me.phase == running && me.last && me.last == me.committed &&
              me.committed < STEPS -> end_generation() }
  :: atomic { leads[a] && next[a] == decide && me.phase == running && me.committed < STEPS && faults &&
              every(has_reported) -> faults--; end_generation() }
  :: atomic { leads[a] && next[a] == decide && me.committed == STEPS && every(has_ended) -> next[a] = write_done }
  :: atomic { leads[a] && next[a] == decide && STRAYS -> kills[a] = kills[a] | STRAYS }
  :: restart(0)
  :: restart(1)
  :: restart(2)
  :: restart(3)
  :: suspect(0)
  :: suspect(1)
  :: suspect(2)
  :: suspect(3)
  od
}

/* What the process of worker w hears. */
#define leader_ link[node(w)]
#define order told[leader_]
#define hears (has(alive, w) && leader_ != NOBODY && up[leader_] && leads[leader_] && order.generation)
#define is_in (hears && order.generation == generation[w])
#define is_member(v) has(order.live, v)
#define forms(v) (!is_member(v) || has(alive, v))
#define adds(v) (!is_member(v) || (generation[v] == generation[w] && begun[v] >= begun[w]))
#define is_source(v) (is_member(v) && !has(order.joining, v) && v % 2 == w % 2 && v != w)

#define has_run (written.phase == running || written.phase == ended)
#define WRITTEN_HOLDERS (has_run -> written.live : written.live & ~written.joining)

inline step(w) {
  assert(at[w] == reported[w] - 1);
  at[w] = reported[w]; stepped_in[w] = generation[w]
}

proctype worker(byte w) {
  byte source;
end:
  do  /* A generation begins: the process brings its state to the committed step. */
  :: atomic { hears && order.generation > generation[w] && order.phase != ended && order.phase != abandoned &&
              state[w] != done &&
              has(order.live, w) && has(order.incarnations, w) == has(incarnation, w) ->
      if
      :: has(order.joining, w) -> at[w] = NONE
      :: !has(order.joining, w) && at[w] == order.committed + 1 && MUTANT != 8 ->
          at[w] = order.committed; stepped_in[w] = committed_by[order.committed]
      :: !has(order.joining, w) && at[w] + 1 == order.committed -> step(w)
      :: else
      fi;
      assert(has(order.joining, w) || at[w] == order.committed);
      assert(has(order.joining, w) || stepped_in[w] == committed_by[order.committed]);
      generation[w] = order.generation; reported[w] = order.committed; begun[w] = order.committed;
      state[w] = acknowledged }
  :: atomic { is_in && state[w] == acknowledged && (order.phase == forming || order.phase == running) &&
              every(forms) ->
      if
      :: has(order.joining, w) ->
          if
          :: is_source(0) -> source = 0
          :: is_source(1) -> source = 1
          :: is_source(2) -> source = 2
          :: is_source(3) -> source = 3
          :: else -> assert(false)
          fi;
          if
          :: MUTANT != 4 -> at[w] = at[source]; stepped_in[w] = stepped_in[source]
          :: else
          fi;
          source = 0;
          assert(at[w] == order.committed)
      :: else
      fi;
      state[w] = formed }
  :: atomic { is_in && state[w] == formed && order.phase == running -> state[w] = trains; begun[w]++ }

  /* An iteration. The first of a generation steps after its commit, any other after the commit of the one before. */
  :: atomic { is_in && state[w] == trains && reported[w] < begun[w] && every(adds) -> reported[w]++ }
  :: atomic { is_in && state[w] == trains && at[w] < reported[w] &&
              order.committed >= (reported[w] == order.first -> reported[w] : reported[w] - 1) ->
      step(w);
      if
      :: at[w] < STEPS && at[w] != order.last -> begun[w]++
      :: else
      fi }
  :: atomic { is_in && state[w] == trains && order.committed == STEPS && at[w] == STEPS ->
      assert(stepped_in[w] == committed_by[STEPS]);
      state[w] = done }

  /* The end of a process. */
  :: atomic { hears && has(order.gone, w) && state[w] != done -> 
      assert(hosts(w) & WRITTEN_HOLDERS & ~bit(w));
      end_process(w) }
  :: atomic { has(alive, w) && leader_ != NOBODY && has(kills[leader_], w) ->
      assert(has(struck, w));
      end_process(w) }
  od
}

inline strike(w) {
  atomic {
    faults && !outcome && has(alive, w) && state[w] != done -> faults--; struck = struck | bit(w); end_process(w)
  }
}

proctype environment() {
  byte a;
end:
  do
  :: strike(0)
  :: strike(1)
  :: strike(2)
  :: strike(3)
  :: atomic { faults && !outcome && up[0] && up[1] ->
      if
      :: a = 0
      :: a = 1
      fi;
      faults--; up[a] = false; struck = struck | (3 << (2 * a));
      end_process(2 * a); end_process(2 * a + 1);
      if
      :: role == a -> role = NOBODY
      :: else
      fi;
      leads[a] = false; next[a] = decide; kills[a] = 0; copy(mind[a], nothing); copy(told[a], nothing); a = 0 }
  :: atomic { faults && !outcome && role != NOBODY -> faults--; role = NOBODY }
  :: atomic { drains && !outcome -> drains--; asked = asked | 1 }    /* stages are alike */
  :: atomic { drains && !outcome -> drains--; asked = asked | 4 }
  od
}

init {
  atomic {
    next[0] = decide; next[1] = decide; role = 0; leads[0] = true; link[0] = 0;     /* agents are alike */
    mind[0].live = ALL; mind[0].phase = ended;
    run agent(0); run agent(1); run worker(0); run worker(1); run worker(2); run worker(3); run environment()
  }
end:
  timeout -> assert(outcome)
}

ltl ends { <> outcome }
